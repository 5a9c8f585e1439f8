"""The whole service under load for the chaos tests: servers that may die, programs kept running,
documents whose every page is known by its mark, and a feeder that never lets the work run out.
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
from rag_service.embedded import EmbeddedStack
from tests.chaos import witness
from tests.chaos.keeper import Keeper
from tests.fakes.ocr_server import FakeOcrServer, Reply, Request
from tests.fakes.scans import HEIGHT, Mark, new_number, pdf, scan
from tests.processes import Program
from tests.service import Service, open_service

# Short enough for forty faults; the shipped ones in the same proportions.
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
# Nothing but the faults may cause a second request or a second doorbell.
PATIENT = {
    "RAG_SERVICE_RETRY_WAITS": "10,20,40,120,120",
    "RAG_SERVICE_RETRY_LATER_WAIT": "60",
    "RAG_SERVICE_REDIS_VISIBILITY_TIMEOUT": "600",
    "GLMOCR_PIPELINE_MAX_WORKERS": "3",
}
OCR_PLACES = ("ocr-1", "ocr-2")
PLACES = ("maintenance", "prepare", *OCR_PLACES)
# One worker's forks can take over all that the other held: a fault's wait is no wait for a turn.
_FORKS = {"prepare": 4, "ocr": 5}
_READ_SECONDS = (0.1, 0.3)
_IN_FLIGHT = 4
_FEED_EVERY = 0.2


@dataclass(frozen=True)
class Fed:
    """A document that was handed in: its mark's number, its id, how many pages of each kind."""

    number: int
    id: str
    scanned: int
    native: int = 0

    @property
    def pages(self) -> int:
        return self.native + self.scanned

    def text(self, page: int) -> str:
        """What the page must say in the end."""
        return (
            native_text(self.number, page) if page <= self.native else Mark(self.number, page).text
        )


@dataclass
class Rig:
    """What a chaos test works with."""

    service: Service
    keeper: Keeper
    stack: EmbeddedStack
    random: random.Random
    fed: list[Fed] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def ocr(self) -> FakeOcrServer:
        return self.service.ocr

    def feed(self, scanned: int, native: int = 0, *, priority: str | None = None) -> Fed:
        """Hand in a new document; its native pages come first."""
        number = new_number()
        content = scan(number, scanned) if native == 0 else _mixed(number, native, scanned)
        priority = priority or self.random.choice(["bulk", "interactive"])
        document_id = self.service.add(content, f"scan-{number}.pdf", priority=priority)
        fed = Fed(number, document_id, scanned, native)
        self.fed.append(fed)
        return fed

    def fed_as(self, number: int) -> Fed:
        """The document with this mark number."""
        return next(fed for fed in self.fed if fed.number == number)

    def server_pid(self, name: str) -> int | None:
        """The process of `postgres` or `valkey`; None between death and restart."""
        return next(p.pid for p in self.stack.supervisor.status() if p.name == name)

    def start_programs(self) -> None:
        """Maintenance, one prepare worker, two ocr workers; kept running from now on."""
        for place in PLACES:
            self.keeper.keep(place, lambda place=place: self.start_program(place))
        self.service.programs.wait_ready(*(self.keeper.at(p) for p in PLACES[1:]))

    def start_program(self, place: str) -> Program:
        """A fresh program for this place."""
        programs, stage = self.service.programs, place.split("-")[0]
        if stage == "maintenance":
            return programs.start_maintenance()
        return programs.start_worker(stage, _FORKS[stage])

    def wait_all(self, seconds: float) -> None:
        """Return when no run is left unfinished."""
        self.service.programs.wait_until(
            lambda: not witness.unfinished(), "every document has ended", seconds
        )


@contextmanager
def open_rig(seed: int, **variables: str) -> Iterator[Rig]:
    """A rig over servers of its own, without any program yet."""
    # Not pytest's own folder: PostgreSQL's account may not enter that when we are root.
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
                Keeper(service.programs) as keeper,
            ):
                _make_slow(service.ocr, random.Random(seed + 1))
                witness.begin_watch()
                yield Rig(service, keeper, stack, random.Random(seed))


@contextmanager
def _open_servers(folder: Path) -> Iterator[EmbeddedStack]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("DATABASE_URL", "REDIS_URL"):
            patch.delenv(name, raising=False)
        settings = load_settings()
    with EmbeddedStack(settings, folder, durable=True) as stack:
        yield stack


def _make_slow(ocr: FakeOcrServer, rng: random.Random) -> None:
    """Each page takes the server a little, never the same."""

    def choose(_: Request) -> None:
        ocr.default = Reply(delay=rng.uniform(*_READ_SECONDS))

    ocr.on_request = choose


@contextmanager
def feeding(rig: Rig) -> Iterator[None]:
    """Keep several documents in flight all the time, small and large, urgent and not."""
    stop = threading.Event()
    failures: list[Exception] = []

    def feed() -> None:
        try:
            while not stop.wait(_FEED_EVERY):
                if len(witness.unfinished()) < _IN_FLIGHT:
                    rig.feed(rig.random.randint(4, 14))
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=feed, name="feeder")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]


def native_text(number: int, page: int) -> str:
    """What a page with a text layer says."""
    return f"This is the printed page {page} of the document {number}, and it has a text layer."


def _mixed(number: int, native: int, scanned: int) -> bytes:
    """Pages with a text layer, then scanned ones."""
    printed = [
        f"BT /F 12 Tf 72 {HEIGHT - 100} Td ({native_text(number, page)}) Tj ET".encode()
        for page in range(1, native + 1)
    ]
    document = pymupdf.open(stream=pdf(printed))
    marks = range(native + 1, native + scanned + 1)
    document.insert_pdf(pymupdf.open(stream=scan(number, marks)))
    return document.tobytes()
