"""Real worker processes of the fake RunPod endpoint: runpod's own loop around the handler."""

from __future__ import annotations

import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

from tests.fakes.runpod_service import RunPodService
from tests.processes import Program, Programs

HANDLER = [sys.executable, "-m", "workers.runpod_handler.handler"]
# The switches of RunPod and of the handler for machines without a GPU.
_NO_GPU = {
    "RUNPOD_SKIP_AUTO_SYSTEM_CHECKS": "true",
    "RUNPOD_SKIP_GPU_CHECK": "true",
    "RUNPOD_HANDLER_SKIP_GPU_CHECK": "true",
}


@dataclass(frozen=True)
class RunPodWorker:
    """A worker process and its id in the service."""

    id: str
    program: Program


class RunPodWorkers:
    """The workers of a service; the Programs context stops them."""

    def __init__(
        self, service: RunPodService, programs: Programs, *, ocr_url: str, volume: Path | None
    ) -> None:
        """`volume`: the folder that all workers share, or None."""
        self._service = service
        self._programs = programs
        self._env = {
            **service.worker_variables,
            **_NO_GPU,
            "GLMOCR_BASE_URL": ocr_url,
            "RUNPOD_HANDLER_VOLUME": str(volume or "/nonexistent/volume"),
            "RUNPOD_PING_INTERVAL": "2000",
            "RAG_SERVICE_OCR_LAYOUT": "page",
        }
        self.all: list[RunPodWorker] = []

    def start(self, number: int = 1, *, command: list[str] | None = None, **env: str) -> None:
        """Start this number of workers; jobs posted meanwhile wait for them."""
        for _ in range(number):
            worker_id = f"worker-{uuid.uuid4().hex[:8]}"
            variables = {**self._env, "RUNPOD_POD_ID": worker_id, **env}
            program = self._programs.start("runpod-worker", command or HANDLER, **variables)
            self.all.append(RunPodWorker(worker_id, program))

    def by_id(self, worker_id: str) -> RunPodWorker:
        return next(worker for worker in self.all if worker.id == worker_id)

    def kill(self, worker_id: str) -> None:
        """SIGKILL a worker and its children, as if its container ended; RunPod notices it."""
        self.by_id(worker_id).program.kill()
        self._service.table.gone(worker_id)

    def wait_ready(self) -> None:
        """Wait until every worker has asked for a job."""
        wanted = {worker.id for worker in self.all}
        self._programs.wait_until(
            lambda: wanted <= set(self._service.table.workers), "the RunPod workers ask for jobs"
        )
