"""An endpoint of the fake RunPod with real handler workers and a fake OCR server."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.fakes.ocr_server import FakeOcrServer
from tests.fakes.runpod_jobs import Job
from tests.fakes.runpod_service import RunPodService
from tests.fakes.runpod_workers import RunPodWorkers
from tests.fakes.scans import Mark, scan
from tests.processes import Programs

MIB = 1 << 20
# Small limits, so that tests can reach them, and short waits.
ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "RAG_SERVICE_RETRY_WAITS": "0.1,0.2",
    "RAG_SERVICE_RETRY_LATER_WAIT": "0.1",
    # With the two that are rendered ahead, eight pages are in progress.
    "GLMOCR_PIPELINE_MAX_WORKERS": "6",
    "RAG_SERVICE_HANDLER_HEARTBEAT": "0.3",
    "RAG_SERVICE_HANDLER_STALE_AFTER": "3",
    "RAG_SERVICE_HANDLER_PROGRESS_EVERY": "0.1",
    "RAG_SERVICE_HANDLER_MAX_OUTPUT_BYTES": "100000",
    "RAG_SERVICE_HANDLER_MAX_DOCUMENT_BYTES": str(MIB),
}


@dataclass
class Endpoint:
    """An endpoint, its workers and the OCR server of all of them."""

    service: RunPodService
    ocr: FakeOcrServer
    workers: RunPodWorkers
    programs: Programs
    volume: Path

    @property
    def stored_pages(self) -> list[Path]:
        return list(self.volume.glob("keys/*/page-*.json"))

    def post(self, job_input: dict[str, Any]) -> str:
        answer = httpx.post(
            f"{self.service.base_url}/{self.service.endpoint}/run",
            json={"input": job_input},
            headers={"Authorization": f"Bearer {self.service.key}"},
        )
        return answer.raise_for_status().json()["id"]

    def ended(self, remote_id: str) -> Job:
        job = self.service.job(remote_id)
        self.programs.wait_until(lambda: job.final, "the job ends")
        return job

    def output(self, remote_id: str) -> dict[str, Any]:
        job = self.ended(remote_id)
        assert job.status == "COMPLETED", job.error
        return job.output

    def error(self, remote_id: str) -> dict[str, Any]:
        job = self.ended(remote_id)
        assert job.status == "FAILED", job.output
        return json.loads(job.error)

    def wait_for_request(self, page: Mark) -> None:
        self.programs.wait_until(lambda: self.ocr.alive(page), f"a request for {page}")


@contextmanager
def open_endpoint(folder: Path, *, workers: int = 0) -> Iterator[Endpoint]:
    """Open an endpoint whose first workers are ready."""
    (folder / "volume").mkdir()
    with (
        RunPodService() as service,
        FakeOcrServer() as ocr,
        Programs(ENVIRONMENT, folder) as programs,
    ):
        service.table.requeues = 3
        volume = folder / "volume" / "rag_service"
        fleet = RunPodWorkers(service, programs, ocr_url=ocr.url, volume=volume)
        fleet.start(workers)
        fleet.wait_ready()
        yield Endpoint(service, ocr, fleet, programs, volume)


def job_input(document: int, pages: list[int], **changes: Any) -> dict[str, Any]:
    """Return a job for these pages of a scan; their marks are 1, 2, …"""
    return {
        "version": 1,
        "request_key": f"run-{document}:options:pages",
        "filename": "scan.pdf",
        "document": inline(scan(document, len(pages))),
        "pages": pages,
        "options": {"dpi": 72, "layout": "page", "max_tokens": 4096},
        **changes,
    }


def inline(data: bytes) -> dict[str, str]:
    return {"kind": "inline", "encoding": "base64", "data": base64.b64encode(data).decode()}
