"""A whole service without HTTP: a database and a broker queue of its own, programs, a fake OCR.

Used by the tests of workers and by the chaos tests.
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import create_engine, make_url, text

from rag_service.config.loader import get_settings
from rag_service.database import engine, schema
from rag_service.database.engine import begin
from rag_service.documents import deletion, intake
from rag_service.documents.incoming_file import IncomingFile
from rag_service.documents.storage import DocumentStore
from rag_service.jobs import wake_ups
from rag_service.knowledgebase import document_queries, page_queries
from rag_service.knowledgebase.views import DocumentView, PageView
from tests.fakes.ocr_server import FakeOcrServer, Request
from tests.fakes.scans import Mark, new_number, scan
from tests.processes import PATIENCE, Programs

# Everything that makes people wait by the minute, here by the second or less.
QUICK = {
    "RAG_SERVICE_LEASE_SECONDS": "6",
    "RAG_SERVICE_LEASE_RENEW_EVERY": "1.5",
    "RAG_SERVICE_LEASE_GIVE_UP_AFTER": "4.5",
    "RAG_SERVICE_RETRY_WAITS": "0.1,0.2,0.2,0.2,0.2",
    "RAG_SERVICE_RETRY_LATER_WAIT": "0.3",
    "RAG_SERVICE_OCR_PROBE_INTERVAL": "0.5",
    "RAG_SERVICE_MAINTENANCE_INTERVAL": "0.3",
    "RAG_SERVICE_REDIS_VISIBILITY_TIMEOUT": "5",
    "RAG_SERVICE_OCR_DPI": "72",
    "GLMOCR_PIPELINE_MAX_WORKERS": "4",
    # No layout server beside each worker; the tests of regions ask for one.
    "RAG_SERVICE_OCR_LAYOUT": "page",
}
ENDED = ("processed", "failed", "cancelled")


class Service:
    """Documents go in as through the API; what became of them is read as the API shows it."""

    def __init__(self, ocr: FakeOcrServer, programs: Programs) -> None:
        self.ocr = ocr
        self.programs = programs

    def add(self, content: bytes, filename: str = "scan.pdf", **options: str) -> str:
        """The id of the document that this upload became."""
        settings = get_settings()
        with IncomingFile(settings) as spool:
            spool.copy_from(io.BytesIO(content))
            chosen = intake.check_options(settings, **options)
            return intake.accept(settings, DocumentStore(settings), spool, filename, chosen).id

    def view(self, document_id: str) -> DocumentView:
        """The document as people see it."""
        view = document_queries.get_document(document_id, self.ocr.url)
        assert view is not None
        return view

    def pages(self, document_id: str) -> list[PageView]:
        """The pages of the document's newest run."""
        return list(page_queries.list_pages(self.view(document_id).latest_run.id))

    def page(self, document_id: str, number: int) -> PageView:
        """One page of the newest run."""
        return next(page for page in self.pages(document_id) if page.number == number)

    def run(self, document_id: str) -> Any:
        """The newest run's row: its claim and its counts."""
        query = "SELECT * FROM runs WHERE document_id = :id ORDER BY number DESC LIMIT 1"
        return self.rows(query, id=document_id)[0]

    def server_state(self) -> str | None:
        """What the workers together think of the OCR server."""
        rows = self.rows("SELECT state FROM ocr_servers WHERE url = :url", url=self.ocr.url)
        return rows[0].state if rows else None

    def rows(self, query: str, **values: object) -> Sequence[Any]:
        """Look into the database."""
        with begin() as connection:
            return connection.execute(text(query), values).all()

    def cancel(self, document_id: str) -> bool:
        """As DELETE and cancel do."""
        return deletion.cancel(document_id)

    def wait_for(self, document_id: str, *statuses: str, seconds: float = PATIENCE) -> DocumentView:
        """The document once its newest run is in one of these states (any end, by default)."""
        wanted = statuses or ENDED

        def reached() -> DocumentView | None:
            view = self.view(document_id)
            return view if view.latest_run.status in wanted else None

        what = f"{document_id} is {' or '.join(wanted)}"
        return self.programs.wait_until(reached, what, seconds)


class Scan:
    """A scan that has been handed in; `set_up` tells the server about it before that."""

    def __init__(
        self,
        service: Service,
        pages: int,
        *,
        set_up: Callable[[Scan], object] = lambda _: None,
        **options: str,
    ) -> None:
        self.service, self.pages = service, pages
        self.number = new_number()
        set_up(self)
        content = scan(self.number, pages)
        self.id = service.add(content, f"scan-{self.number}.pdf", **options)

    def mark(self, page: int = 1) -> Mark:
        return Mark(self.number, page)

    def requests(self, page: int = 1) -> list[Request]:
        """What the OCR server was asked for this page."""
        return self.service.ocr.of(self.mark(page))

    def page(self, number: int = 1) -> PageView:
        return self.service.page(self.id, number)

    def ended(self, seconds: float = PATIENCE) -> DocumentView:
        """The document once its run has ended."""
        return self.service.wait_for(self.id, seconds=seconds)

    def parked(self) -> None:
        """Return once it waits for the OCR server."""

        def waits() -> bool:
            return self.service.view(self.id).waiting_for == "ocr_server"

        self.service.programs.wait_until(waits, f"{self.id} waits for the OCR server")

    def charges(self) -> tuple[int, int, int]:
        """All that could be held against it: crashes, expired leases, later tries of pages."""
        tries = "SELECT sum(tries) AS tries FROM pages WHERE run_id = :id"
        run = self.service.run(self.id)
        return run.crashes, run.expiries, self.service.rows(tries, id=run.id)[0].tries


@contextmanager
def open_service(stack: dict[str, str], folder: Path, **variables: str) -> Iterator[Service]:
    """A service over a fresh database and an emptied broker, for this process and its programs.

    `stack` is the fixture of that name. No worker runs yet.
    """
    name = f"test_{uuid.uuid4().hex}"
    _administer(stack, f"CREATE DATABASE {name}")
    _empty_broker(stack)
    url = make_url(stack["DATABASE_URL"]).set(database=name).render_as_string(False)
    with FakeOcrServer() as ocr, pytest.MonkeyPatch.context() as patch:
        own = {
            "DATABASE_URL": url,
            "REDIS_URL": stack["REDIS_URL"],
            "RAG_SERVICE_DATA_DIR": str(folder / "data"),
            "GLMOCR_BASE_URL": ocr.url,
            "PYTHONUNBUFFERED": "1",
        }
        for key, value in (QUICK | own | variables).items():
            patch.setenv(key, value)
        _forget_connections()
        schema.migrate()
        try:
            with Programs(os.environ, folder) as programs:
                yield Service(ocr, programs)
        finally:
            _forget_connections()
            _administer(stack, f"DROP DATABASE {name} WITH (FORCE)")
    _forget_connections()


def _forget_connections() -> None:
    """Let the next use read the environment anew, as a process that has just started does."""
    for open_engine in engine._engines.values():
        open_engine.dispose()
    engine._engines.clear()
    wake_ups._sender.cache_clear()
    get_settings.cache_clear()


def _empty_broker(stack: dict[str, str]) -> None:
    client = redis.Redis.from_url(stack["REDIS_URL"])
    client.flushall()
    client.close()


def _administer(stack: dict[str, str], statement: str) -> None:
    admin = create_engine(stack["DATABASE_URL"], isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(statement))
    admin.dispose()
