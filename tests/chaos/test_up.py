"""`rag-service up` killed in the middle: no process is left, and the next `up` goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from rag_service.config.option_list import PREFIXES
from tests.fakes.ocr_server import FakeOcrServer, Reply
from tests.fakes.scans import Mark, new_number, scan
from tests.net import free_port
from tests.processes import is_alive
from tests.waiting import eventually

_FORKS, _PAGES_IN_FLIGHT = 3, 3
_DOCUMENTS, _PAGES = 6, 10
_LIMIT_SECONDS = 240.0
# A shutdown of PostgreSQL may take this long after its owner was killed.
_SHUTDOWN_SECONDS = 120.0
_SETTING_PREFIXES = (*PREFIXES, "DATABASE_URL", "REDIS_URL")


@dataclass
class Up:
    """A running `rag-service up` and a client of its API."""

    process: subprocess.Popen[bytes]
    client: httpx.Client
    log: Path

    def add(self, content: bytes, filename: str) -> str:
        answer = self.client.post("/documents", files={"file": (filename, content)})
        assert answer.status_code == 202, answer.text
        return answer.json()["id"]

    def status(self, document_id: str) -> str:
        return self.client.get(f"/documents/{document_id}").json()["status"]

    def family(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _LIMIT_SECONDS
        while not condition():
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, f"{what}\n{self.log.read_text()[-8000:]}"
            time.sleep(0.1)

    def is_ready(self) -> bool:
        try:
            return self.client.get("/health/ready").is_success
        except httpx.TransportError:
            return False


@contextmanager
def _up(folder: Path, ocr: FakeOcrServer) -> Iterator[Up]:
    """Start `rag-service up` as a user does, over one data folder, with short leases."""
    bare = {
        name: value for name, value in os.environ.items() if not name.startswith(_SETTING_PREFIXES)
    }
    port = free_port()
    log = folder / "up.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rag_service.cli.main", "up"],
            env=bare
            | {
                "RAG_SERVICE_DATA_DIR": str(folder / "data"),
                "RAG_SERVICE_API_PORT": str(port),
                "RAG_SERVICE_FLOWER_PORT": str(free_port()),
                "RAG_SERVICE_OCR_DPI": "72",
                "RAG_SERVICE_LEASE_SECONDS": "8",
                "RAG_SERVICE_LEASE_RENEW_EVERY": "2",
                "RAG_SERVICE_LEASE_GIVE_UP_AFTER": "6",
                "GLMOCR_BASE_URL": ocr.url,
                "OCR_WORKER_CONCURRENCY": str(_FORKS),
                "GLMOCR_PIPELINE_MAX_WORKERS": str(_PAGES_IN_FLIGHT),
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            up = Up(process, client, log)
            up.wait(up.is_ready, "up is ready")
            yield up
    finally:
        process.terminate()
        process.wait(_LIMIT_SECONDS)


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not pytest's own folder: if this is root, PostgreSQL's account may not enter that.
    with tempfile.TemporaryDirectory(prefix="rag-chaos-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o711)
        yield Path(name)


def test_a_killed_up_leaves_no_process_and_the_next_one_goes_on(folder: Path) -> None:
    with FakeOcrServer() as ocr:
        ocr.default = Reply(delay=0.3)
        with _up(folder, ocr) as up:
            scans = {new_number(): "" for _ in range(_DOCUMENTS)}
            for number in scans:
                scans[number] = up.add(scan(number, _PAGES), f"scan-{number}.pdf")
            up.wait(
                lambda: len(ocr.requests) > 2 * _PAGES,
                "as many pages as two documents have are read",
            )
            family = up.family()
            up.process.kill()
            up.process.wait()
            _require_ended(family)
            eventually(lambda: not ocr.alive())
        with _up(folder, ocr) as up:
            for number, document_id in scans.items():
                up.wait(lambda i=document_id: up.status(i) == "processed", f"scan-{number}")
                markdown = up.client.get(f"/documents/{document_id}/markdown").text
                for page in range(1, _PAGES + 1):
                    assert markdown.count(Mark(number, page).text) == 1
        asked = Counter(request.mark for request in ocr.requests)
        assert len(asked) == _DOCUMENTS * _PAGES
        assert max(asked.values()) <= 2
        assert len(ocr.requests) <= _DOCUMENTS * _PAGES + _FORKS * _PAGES_IN_FLIGHT


def _require_ended(family: list[int]) -> None:
    deadline = time.monotonic() + _SHUTDOWN_SECONDS
    while left := [pid for pid in family if is_alive(pid)]:
        assert time.monotonic() < deadline, [psutil.Process(pid).cmdline() for pid in left]
        time.sleep(0.1)
