"""The programs that `run` and `up` start besides the servers: command, order, environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rag_service.states import Stage

if TYPE_CHECKING:
    from rag_service.config.options import Settings
    from rag_service.embedded import Program

OCR_SERVER, MAINTENANCE, API, FLOWER = "cpu-ocr-server", "maintenance", "api", "flower"
PROGRAMS = (OCR_SERVER, MAINTENANCE, Stage.OCR.value, Stage.PREPARE.value, API, FLOWER)

# Importing a worker or loading the OCR model takes seconds, on a busy small machine longer.
_READY_SECONDS = 120.0
_PROBE_SECONDS = 2.0
# What a worker needs after its soft shutdown to disconnect from broker and database.
_DISCONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class StartPlan:
    """Builds the programs of a service. A worker gets `drain_seconds` to stop."""

    settings: Settings
    logs: Path
    drain_seconds: float

    def ocr_server(self) -> Program:
        url = f"{cpu_ocr_url(self.settings.cpu_ocr.host, self.settings.cpu_ocr.port)}/health"
        return self._program(OCR_SERVER, "cpu-ocr-server", ready=lambda: _answers(url))

    def workers(self) -> list[Program]:
        """Return maintenance first: it stops last and releases what the others leave."""
        return [
            self._program(MAINTENANCE, "worker", "maintenance"),
            self._worker(Stage.OCR),
            self._worker(Stage.PREPARE),
        ]

    def prepare_only(self) -> list[Program]:
        """Return the workers of a service that sends no page to an OCR server."""
        return [program for program in self.workers() if program.name != Stage.OCR]

    def api(self) -> Program:
        url = f"{self.api_url()}/health/live"
        return self._program(API, "serve", ready=lambda: _answers(url))

    def flower(self) -> Program:
        """Return Flower. Nothing waits until it is ready: documents do not need it."""
        return self._program(FLOWER, "flower")

    def api_url(self) -> str:
        return f"http://{_connect_host(self.settings.api.host)}:{self.settings.api.port}"

    def flower_url(self) -> str:
        return f"http://{_connect_host(self.settings.flower.host)}:{self.settings.flower.port}"

    def _worker(self, stage: Stage) -> Program:
        return self._program(
            stage.value, "worker", stage.value,
            ready=lambda: _consumes(stage),
            stop_seconds=self.drain_seconds + _DISCONNECT_SECONDS,
        )  # fmt: skip

    def _program(
        self,
        name: str,
        *arguments: str,
        ready: Callable[[], bool] | None = None,
        stop_seconds: float = _DISCONNECT_SECONDS,
    ) -> Program:
        from rag_service.embedded import Program

        return Program(
            name=name,
            argv=(sys.executable, "-P", "-m", "rag_service.cli.main", *arguments),
            env=child_environment(os.environ),
            ready=ready,
            ready_seconds=_READY_SECONDS,
            stop_seconds=stop_seconds,
            log=self.logs / f"{name}.log",
        )


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child, without names that this process has warned about."""
    from rag_service.config.loader import current_names

    return current_names(environment) | {"PYTHONUNBUFFERED": "1"}


def embedded_ocr_environment(settings: Settings, host: str, port: int) -> dict[str, str]:
    """Return the variables for the CPU OCR server: its address and the limits that suit it."""
    from rag_service.config.loader import is_chosen
    from workers.servers.cpu_ocr.ocr_engine import model_name

    environment = {
        "GLMOCR_BASE_URL": cpu_ocr_url(host, port),
        "GLMOCR_MODEL": model_name(settings.cpu_ocr.engine),
        "RAG_SERVICE_CPU_OCR_HOST": host,
        "RAG_SERVICE_CPU_OCR_PORT": str(port),
    }
    if not is_chosen("ocr.worker_concurrency"):
        environment["OCR_WORKER_CONCURRENCY"] = str(settings.embedded.worker_concurrency)
    if not is_chosen("ocr.pages_in_flight"):
        environment["GLMOCR_PIPELINE_MAX_WORKERS"] = str(settings.embedded.pages_in_flight)
    return environment


def cpu_ocr_url(host: str, port: int) -> str:
    """Return the URL of the CPU OCR server for processes of this machine."""
    return f"http://{_connect_host(host)}:{port}"


def _connect_host(host: str) -> str:
    """Return the host to connect to for a host that a server listens on."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"[{host}]" if ":" in host else host


def _answers(url: str) -> bool:
    import httpx

    try:
        # No proxy from the environment: the server is on this machine.
        with httpx.Client(trust_env=False, timeout=_PROBE_SECONDS) as client:
            return client.get(url).is_success
    except httpx.HTTPError:
        return False


def _consumes(stage: Stage) -> bool:
    from rag_service.jobs import live_workers

    return bool(live_workers.of_stage(stage))
