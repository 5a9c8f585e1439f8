"""What must be true before a worker takes its first job. Each failure is one clear sentence.

Run as a RunPod fitness check: whatever is raised here ends the process with exit status 1.
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
# The image's CUDA 12.9 was seen to run on the drivers of CUDA 12.8, not on older ones.
LEAST_DRIVER = 570
_TOOL_SECONDS = 180
_BETWEEN_PROBES = 2.0
_TELL_SECONDS = 20.0
_SURE_SECONDS = 6.0
_LOOK_AT_GPU = """
import json, torch
print(json.dumps({"gpu": torch.cuda.is_available(), "torch": torch.__version__,
                  "cuda": torch.version.cuda}))
"""


class GpuUnusable(Exception):
    """The machine cannot run the OCR server on a GPU."""


def check_engine(handler: HandlerOptions) -> None:
    """Raises ConfigurationError for an engine that this image does not have."""
    if handler.engine != ENGINE:
        raise ConfigurationError(
            f"GLMOCR_ENGINE is {handler.engine!r}; this image runs {ENGINE!r} only."
        )


def check_gpu(handler: HandlerOptions) -> None:
    """Raises GpuUnusable: torch would run on the CPU without a word, hundreds of times slower."""
    if handler.skip_gpu_check:
        log.warning("RUNPOD_HANDLER_SKIP_GPU_CHECK is set: nobody looked for a GPU.")
        return
    driver = driver_version(_output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv"]))
    if _number(driver)[0] < LEAST_DRIVER:
        raise GpuUnusable(
            f"The NVIDIA driver {driver} is too old: this image needs {LEAST_DRIVER}."
        )
    seen = json.loads(_output([sys.executable, "-c", _LOOK_AT_GPU]).splitlines()[-1])
    if not seen["gpu"]:
        raise GpuUnusable(
            f"torch {seen['torch']} (CUDA {seen['cuda']}, driver {driver}) sees no GPU."
        )


def driver_version(said: str) -> str:
    """The oldest driver in nvidia-smi's answer. Raises GpuUnusable where it names none."""
    found: list[str] = re.findall(r"^\s*(\d+(?:\.\d+)+)\s*$", said, re.MULTILINE)
    if not found:
        raise GpuUnusable(f"nvidia-smi names no driver: {' '.join(said.split())[:200]}")
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
    """Raises ConfigurationError where the image's own setting of the server's place is gone."""
    if ocr.base_url is None:
        raise ConfigurationError(
            "GLMOCR_BASE_URL is not set: the image sets it to the OCR server that it starts beside "
            "the handler."
        )


async def wait_for_server(settings: Settings, server: ServerProcess) -> None:
    """Return when the OCR server serves our model. Raises ServerUnhealthy."""
    wait = _Wait(settings.handler.start_timeout)
    async with OcrClient(settings.ocr, connections=1) as client:
        while not (probe := await client.probe()).ok:
            if server.ended:
                raise ServerUnhealthy(server.ended)
            wait.go_on(probe)
            await asyncio.sleep(min(_BETWEEN_PROBES, wait.left))
    log.info("The OCR server at %s is up.", settings.ocr.base_url)


class _Wait:
    """The wait for a server that starts: how long it may take, and what is said of it meanwhile."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._until = time.monotonic() + limit
        self._told_at = float("-inf")
        self._other_since: float | None = None

    @property
    def left(self) -> float:
        """Seconds, from 0."""
        return max(0.0, self._until - time.monotonic())

    def go_on(self, probe: Probe) -> None:
        """Say now and then what is waited for. Raises ServerUnhealthy where it is of no use."""
        now = time.monotonic()
        # One that is still loading may say anything for a moment.
        self._other_since = (self._other_since or now) if probe.other_model else None
        if self._other_since is not None and now - self._other_since >= _SURE_SECONDS:
            raise ServerUnhealthy(probe.message)
        if now > self._until:
            raise ServerUnhealthy(
                f"The OCR server did not come up in {self._limit:g} s: {probe.message}"
            )
        if now - self._told_at >= _TELL_SECONDS:
            log.info("Waiting for the OCR server: %s", probe.message)
            self._told_at = now


def warn_of_missing_volume(handler: HandlerOptions) -> None:
    """Say what it means that there is none; it does not stop the worker."""
    if not handler.volume.parent.is_dir():
        log.warning(
            "There is no network volume at %s: work done under a request key is not kept, and "
            "models are downloaded at every cold start.",
            handler.volume.parent,
        )


def bring_layout_model(settings: Settings) -> None:
    """Download the layout model's weights where they are absent; then they stay.

    Raises ConfigurationError where they cannot be had.
    """
    layout = settings.layout
    if settings.needs_layout_server and layout.folder is not None:
        ensure_model(layout.folder, layout.repo)
