"""Checks that a worker must pass before its first job. Each failure is one sentence.

They run as a RunPod fitness check: an exception ends the process with exit status 1.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
import time

from rag_service.config.options import HandlerOptions, OcrOptions, Settings
from rag_service.errors import ConfigurationError
from rag_service.layout.model_download import ensure_model
from rag_service.ocr.ocr_client import OcrClient, Probe
from workers.runpod_handler.faults import ServerUnhealthy
from workers.runpod_handler.server_process import ServerProcess

log = logging.getLogger(__name__)

ENGINE = "sglang"
# The image's CUDA 12.9 runs on the drivers of CUDA 12.8 and newer; older ones failed in tests.
MIN_DRIVER = 570
_TOOL_SECONDS = 180
_PROBE_SECONDS = 2.0
_LOG_SECONDS = 20.0
# A server that reports another model for this long will not serve the right one.
_OTHER_MODEL_SECONDS = 6.0
_GPU_SCRIPT = """
import json, torch
print(json.dumps({"gpu": torch.cuda.is_available(), "torch": torch.__version__,
                  "cuda": torch.version.cuda}))
"""


class GpuUnusable(Exception):
    """The machine cannot run the OCR server on a GPU."""


def check_engine(handler: HandlerOptions) -> None:
    """Raise ConfigurationError for an engine that this image does not have."""
    if handler.engine != ENGINE:
        raise ConfigurationError(
            f"GLMOCR_ENGINE is {handler.engine!r}; this image runs {ENGINE!r} only."
        )


def check_gpu(handler: HandlerOptions) -> None:
    """Raise GpuUnusable without a usable GPU: torch would silently run on the CPU, far slower."""
    if handler.skip_gpu_check:
        log.warning("RUNPOD_HANDLER_SKIP_GPU_CHECK is set: the GPU was not checked.")
        return
    driver = driver_version(_output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv"]))
    if _number(driver)[0] < MIN_DRIVER:
        raise GpuUnusable(
            f"The NVIDIA driver {driver} is too old: this image needs {MIN_DRIVER} or newer."
        )
    found = json.loads(_output([sys.executable, "-c", _GPU_SCRIPT]).splitlines()[-1])
    if not found["gpu"]:
        raise GpuUnusable(
            f"torch {found['torch']} (CUDA {found['cuda']}, driver {driver}) finds no GPU."
        )


def driver_version(output: str) -> str:
    """Return the oldest driver in nvidia-smi's output. Raises GpuUnusable if there is none."""
    found: list[str] = re.findall(r"^\s*(\d+(?:\.\d+)+)\s*$", output, re.MULTILINE)
    if not found:
        raise GpuUnusable(f"nvidia-smi reports no driver: {' '.join(output.split())[:200]}")
    return min(found, key=_number)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GpuUnusable(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise GpuUnusable(f"{command[0]} failed: {lines[-1][:300]}")
    return done.stdout


def check_server_named(ocr: OcrOptions) -> None:
    """Raise ConfigurationError if the OCR server's URL, which the image sets, is missing."""
    if ocr.base_url is None:
        raise ConfigurationError(
            "GLMOCR_BASE_URL is not set: the image sets it to the OCR server that runs beside "
            "the handler."
        )


async def wait_for_server(settings: Settings, server: ServerProcess) -> None:
    """Return when the OCR server serves the configured model. Raises ServerUnhealthy."""
    wait = _StartWait(settings.handler.start_timeout)
    async with OcrClient(settings.ocr, connections=1) as client:
        while not (probe := await client.probe()).ok:
            if server.ended:
                raise ServerUnhealthy(server.ended)
            wait.check(probe)
            await asyncio.sleep(min(_PROBE_SECONDS, wait.left))
    log.info("The OCR server at %s is up.", settings.ocr.base_url)


class _StartWait:
    """The wait for a server that starts, up to `limit` seconds."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._until = time.monotonic() + limit
        self._logged_at = float("-inf")
        self._other_since: float | None = None

    @property
    def left(self) -> float:
        """The seconds left, at least 0."""
        return max(0.0, self._until - time.monotonic())

    def check(self, probe: Probe) -> None:
        """Log the reason from time to time. Raises ServerUnhealthy if waiting cannot help."""
        now = time.monotonic()
        # A server that is still loading may name another model for a moment.
        self._other_since = (self._other_since or now) if probe.other_model else None
        if self._other_since is not None and now - self._other_since >= _OTHER_MODEL_SECONDS:
            raise ServerUnhealthy(probe.message)
        if now > self._until:
            raise ServerUnhealthy(
                f"The OCR server did not start within {self._limit:g} s: {probe.message}"
            )
        if now - self._logged_at >= _LOG_SECONDS:
            log.info("Waiting for the OCR server: %s", probe.message)
            self._logged_at = now


def warn_of_missing_volume(handler: HandlerOptions) -> None:
    """Log what a missing network volume means; the worker runs without it."""
    if not handler.volume.parent.is_dir():
        log.warning(
            "There is no network volume at %s: results are not kept under their request key, and "
            "models are downloaded at every cold start.",
            handler.volume.parent,
        )


def ensure_layout_model(settings: Settings) -> None:
    """Download the layout model's weights if they are missing.

    Raises ConfigurationError if they cannot be downloaded.
    """
    layout = settings.layout
    if settings.needs_layout_server and layout.folder is not None:
        ensure_model(layout.folder, layout.repo)
