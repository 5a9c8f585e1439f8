"""Real worker processes of the fake RunPod endpoint: runpod's own loop around our handler."""

from __future__ import annotations

import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

from tests.fakes.runpod_service import RunPodService
from tests.processes import Program, Programs

HANDLER = [sys.executable, "-m", "workers.runpod_handler.handler"]
# Only these lines of a worker's environment are RunPod's own switches for machines without a GPU.
_NO_GPU = {
    "RUNPOD_SKIP_AUTO_SYSTEM_CHECKS": "true",
    "RUNPOD_SKIP_GPU_CHECK": "true",
    "RUNPOD_HANDLER_SKIP_GPU_CHECK": "true",
}


@dataclass(frozen=True)
class RunPodWorker:
    """A worker process and the id that the service knows it by."""

    id: str
    program: Program


class RunPodWorkers:
    """Starts workers against a service; the Programs context ends what still runs."""

    def __init__(
        self, service: RunPodService, programs: Programs, *, ocr_url: str, volume: Path | None
    ) -> None:
        """`volume`: the folder that all workers share; None: they have none."""
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
        """Start that many workers; jobs that are posted meanwhile wait for them."""
        for _ in range(number):
            worker_id = f"worker-{uuid.uuid4().hex[:8]}"
            variables = {**self._env, "RUNPOD_POD_ID": worker_id, **env}
            program = self._programs.start("runpod-worker", command or HANDLER, **variables)
            self.all.append(RunPodWorker(worker_id, program))

    def by_id(self, worker_id: str) -> RunPodWorker:
        return next(worker for worker in self.all if worker.id == worker_id)

    def kill(self, worker_id: str) -> None:
        """SIGKILL a worker and all it started, as a container that vanishes; RunPod notices."""
        self.by_id(worker_id).program.kill()
        self._service.table.gone(worker_id)

    def wait_ready(self) -> None:
        """Return when every worker has asked for a job."""
        wanted = {worker.id for worker in self.all}
        self._programs.wait_until(
            lambda: wanted <= set(self._service.table.workers), "the RunPod workers ask for jobs"
        )
