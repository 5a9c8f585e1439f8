"""The whole service under load for the chaos tests.

Its servers may be killed, its programs are restarted, each page of its documents is known by a
mark, and a thread adds documents so that there is always work.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pymupdf
import pytest

from rag_service.config.loader import load_settings
from rag_service.database.engine import DatabaseError, is_outage
from rag_service.embedded import EmbeddedStack
from rag_service.errors import StorageUnavailable
from tests.chaos import event_log
from tests.chaos.restarter import Restarter
from tests.fakes.ocr_server import FakeOcrServer, Reply, Request
from tests.fakes.scans import HEIGHT, Mark, new_number, pdf, scan
from tests.processes import Program
from tests.service import Service, open_service

# Short enough for many faults; in the same proportions as the defaults.
TIMES = {
    "RAG_SERVICE_LEASE_SECONDS": "8",
    "RAG_SERVICE_LEASE_RENEW_EVERY": "2",
    "RAG_SERVICE_LEASE_GIVE_UP_AFTER": "6",
    "RAG_SERVICE_MAINTENANCE_LEASE": "4",
    "RAG_SERVICE_MAINTENANCE_INTERVAL": "1",
}
SHIPPED_TIMES = {
    "RAG_SERVICE_LEASE_SECONDS": "60",
    "RAG_SERVICE_LEASE_RENEW_EVERY": "15",
    "RAG_SERVICE_LEASE_GIVE_UP_AFTER": "45",
    "RAG_SERVICE_MAINTENANCE_LEASE": "30",
    "RAG_SERVICE_MAINTENANCE_INTERVAL": "2",
}
# Long, so that only the faults can cause a second request or wake-up message.
PATIENT = {
    "RAG_SERVICE_RETRY_WAITS": "10,20,40,120,120",
    "RAG_SERVICE_RETRY_LATER_WAIT": "60",
    "RAG_SERVICE_REDIS_VISIBILITY_TIMEOUT": "600",
    "GLMOCR_PIPELINE_MAX_WORKERS": "3",
}
OCR_WORKERS = ("ocr-1", "ocr-2")
PROGRAMS = ("maintenance", "prepare", *OCR_WORKERS)
# The forks of one worker can take over all runs of the other, so no run waits for a free fork.
_FORKS = {"prepare": 4, "ocr": 5}
_READ_SECONDS = (0.1, 0.3)
_IN_FLIGHT = 4
_ADD_EVERY = 0.2
# No outage of a fault lasts this long.
_ADD_SECONDS = 60.0


@dataclass(frozen=True)
class ChaosDocument:
    """A document that was added: the number of its marks, its ID, its pages of each kind."""

    number: int
    id: str
    scanned: int
    native: int = 0

    @property
    def pages(self) -> int:
        return self.native + self.scanned

    def text(self, page: int) -> str:
        """Return the text that the page must have in the end."""
        return (
            native_text(self.number, page) if page <= self.native else Mark(self.number, page).text
        )


@dataclass
class ChaosService:
    """A service under load, and what chaos tests need to disturb it."""

    service: Service
    restarter: Restarter
    stack: EmbeddedStack
    random: random.Random
    documents: list[ChaosDocument] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def ocr(self) -> FakeOcrServer:
        return self.service.ocr

    def add_document(
        self, scanned: int, native: int = 0, *, priority: str | None = None
    ) -> ChaosDocument:
        """Add a new document; its native pages come first."""
        number = new_number()
        content = scan(number, scanned) if native == 0 else _mixed(number, native, scanned)
        priority = priority or self.random.choice(["bulk", "interactive"])
        document_id = self._add(content, f"scan-{number}.pdf", priority)
        document = ChaosDocument(number, document_id, scanned, native)
        self.documents.append(document)
        return document

    def _add(self, content: bytes, filename: str, priority: str) -> str:
        """Add a document; try again in an outage, as a client does after a 503."""
        deadline = time.monotonic() + _ADD_SECONDS
        while True:
            try:
                return self.service.add(content, filename, priority=priority)
            except (StorageUnavailable, DatabaseError) as error:
                passes = isinstance(error, StorageUnavailable) or is_outage(error)
                if not passes or time.monotonic() > deadline:
                    raise
            time.sleep(_ADD_EVERY)

    def document_with_mark(self, number: int) -> ChaosDocument:
        """Return the document with this mark number."""
        return next(document for document in self.documents if document.number == number)

    def server_pid(self, name: str) -> int | None:
        """Return the process ID of `postgres` or `valkey`, or None between death and restart."""
        return next(p.pid for p in self.stack.supervisor.status() if p.name == name)

    def start_programs(self) -> None:
        """Start maintenance, one prepare worker and two ocr workers; restart them when they end."""
        for name in PROGRAMS:
            self.restarter.start(name, lambda name=name: self.start_program(name))
        self.service.programs.wait_ready(*(self.restarter.program(p) for p in PROGRAMS[1:]))

    def start_program(self, name: str) -> Program:
        """Start a new program of this name."""
        programs, stage = self.service.programs, name.split("-")[0]
        if stage == "maintenance":
            return programs.start_maintenance()
        return programs.start_worker(stage, _FORKS[stage])

    def wait_all(self, seconds: float) -> None:
        """Return when every run has ended."""
        self.service.programs.wait_until(
            lambda: not event_log.unfinished(), "every document is finished", seconds
        )


@contextmanager
def open_chaos_service(seed: int, **variables: str) -> Iterator[ChaosService]:
    """Open a service with servers of its own; no program runs yet."""
    # Not pytest's own folder: if this is root, PostgreSQL's account may not enter that.
    with tempfile.TemporaryDirectory(prefix="rag-chaos-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o711)
        with _open_servers(folder) as stack:
            environment = stack.start_servers()
            logs = folder / "service"
            logs.mkdir()
            variables = TIMES | PATIENT | variables
            with (
                open_service(environment, logs, **variables) as service,
                Restarter(service.programs) as restarter,
            ):
                _make_slow(service.ocr, random.Random(seed + 1))
                event_log.create_triggers()
                yield ChaosService(service, restarter, stack, random.Random(seed))


@contextmanager
def _open_servers(folder: Path) -> Iterator[EmbeddedStack]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("DATABASE_URL", "REDIS_URL"):
            patch.delenv(name, raising=False)
        settings = load_settings()
    with EmbeddedStack(settings, folder, durable=True) as stack:
        yield stack


def _make_slow(ocr: FakeOcrServer, rng: random.Random) -> None:
    """Let each page take the server a short, random time."""

    def choose(_: Request) -> None:
        ocr.default = Reply(delay=rng.uniform(*_READ_SECONDS))

    ocr.on_request = choose


@contextmanager
def adding_documents(chaos: ChaosService) -> Iterator[None]:
    """Keep several documents in progress all the time, of random size and priority."""
    stop = threading.Event()
    failures: list[Exception] = []

    def add_until_stopped() -> None:
        try:
            while not stop.wait(_ADD_EVERY):
                if len(event_log.unfinished()) < _IN_FLIGHT:
                    chaos.add_document(chaos.random.randint(4, 14))
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=add_until_stopped, name="documents")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]


def native_text(number: int, page: int) -> str:
    """Return the text of a page with a text layer."""
    return f"This is the printed page {page} of the document {number}, and it has a text layer."


def _mixed(number: int, native: int, scanned: int) -> bytes:
    """Return a PDF of pages with a text layer, then scanned ones."""
    printed = [
        f"BT /F 12 Tf 72 {HEIGHT - 100} Td ({native_text(number, page)}) Tj ET".encode()
        for page in range(1, native + 1)
    ]
    document = pymupdf.open(stream=pdf(printed))
    marks = range(native + 1, native + scanned + 1)
    document.insert_pdf(pymupdf.open(stream=scan(number, marks)))
    return document.tobytes()
