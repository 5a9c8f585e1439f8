"""A whole service without HTTP: its own database, the broker, programs, a fake OCR server."""

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

# Short waits. Leases are long enough that a busy machine renews them in time.
QUICK = {
    "RAG_SERVICE_LEASE_SECONDS": "12",
    "RAG_SERVICE_LEASE_RENEW_EVERY": "1.5",
    "RAG_SERVICE_LEASE_GIVE_UP_AFTER": "10",
    "RAG_SERVICE_RETRY_WAITS": "0.1,0.2,0.2,0.2,0.2",
    "RAG_SERVICE_RETRY_LATER_WAIT": "0.3",
    "RAG_SERVICE_OCR_PROBE_INTERVAL": "0.5",
    "RAG_SERVICE_MAINTENANCE_INTERVAL": "0.3",
    "RAG_SERVICE_REDIS_VISIBILITY_TIMEOUT": "5",
    "RAG_SERVICE_OCR_DPI": "72",
    "GLMOCR_PIPELINE_MAX_WORKERS": "4",
    # No layout server for each worker; the tests of regions turn it on.
    "RAG_SERVICE_OCR_LAYOUT": "page",
}
ENDED = ("processed", "failed", "cancelled")


class Service:
    """Adds documents as the API does, and reads them as the API shows them."""

    def __init__(self, ocr: FakeOcrServer, programs: Programs) -> None:
        self.ocr = ocr
        self.programs = programs

    def add(self, content: bytes, filename: str = "scan.pdf", **options: str) -> str:
        """Add a document and return its ID."""
        settings = get_settings()
        store = DocumentStore(settings)
        with IncomingFile(settings, store.incoming()) as incoming:
            incoming.copy_from(io.BytesIO(content))
            chosen = intake.check_options(settings, **options)
            return intake.accept(settings, store, incoming, filename, chosen).id

    def view(self, document_id: str) -> DocumentView:
        """Return the document as the API shows it."""
        view = document_queries.get_document(document_id, self.ocr.url)
        assert view is not None
        return view

    def pages(self, document_id: str) -> list[PageView]:
        """Return the pages of the document's newest run."""
        return list(page_queries.list_pages(self.view(document_id).latest_run.id))

    def page(self, document_id: str, number: int) -> PageView:
        """Return one page of the newest run."""
        return next(page for page in self.pages(document_id) if page.number == number)

    def run(self, document_id: str) -> Any:
        """Return the row of the newest run: its claim and its counts."""
        query = "SELECT * FROM runs WHERE document_id = :id ORDER BY number DESC LIMIT 1"
        return self.rows(query, id=document_id)[0]

    def server_state(self) -> str | None:
        """Return the state of the OCR server in the database, or None without one."""
        rows = self.rows("SELECT state FROM ocr_servers WHERE url = :url", url=self.ocr.url)
        return rows[0].state if rows else None

    def rows(self, query: str, **values: object) -> Sequence[Any]:
        """Return the rows of a query."""
        with begin() as connection:
            return connection.execute(text(query), values).all()

    def cancel(self, document_id: str) -> bool:
        """Cancel the document as the API does."""
        return deletion.cancel(document_id)

    def wait_for(self, document_id: str, *statuses: str, seconds: float = PATIENCE) -> DocumentView:
        """Return the document when its newest run is in one of these states (default: ended)."""
        wanted = statuses or ENDED

        def reached() -> DocumentView | None:
            view = self.view(document_id)
            return view if view.latest_run.status in wanted else None

        what = f"{document_id} is {' or '.join(wanted)}"
        return self.programs.wait_until(reached, what, seconds)


class Scan:
    """A scan that was added. `set_up` configures the fake server before that."""

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
        """Return the requests of this page that the OCR server received."""
        return self.service.ocr.of(self.mark(page))

    def page(self, number: int = 1) -> PageView:
        return self.service.page(self.id, number)

    def ended(self, seconds: float = PATIENCE) -> DocumentView:
        """Return the document when its run has ended."""
        return self.service.wait_for(self.id, seconds=seconds)

    def parked(self) -> None:
        """Return when it waits for the OCR server."""

        def waits() -> bool:
            return self.service.view(self.id).waiting_for == "ocr_server"

        self.service.programs.wait_until(waits, f"{self.id} waits for the OCR server")

    def charges(self) -> tuple[int, int, int]:
        """Return what it was charged with: crashes, expired leases, later tries of pages."""
        tries = "SELECT sum(tries) AS tries FROM pages WHERE run_id = :id"
        run = self.service.run(self.id)
        return run.crashes, run.expiries, self.service.rows(tries, id=run.id)[0].tries


@contextmanager
def open_service(stack: dict[str, str], folder: Path, **variables: str) -> Iterator[Service]:
    """Open a service with a new database and an empty broker; no worker runs yet.

    It is configured for this process and its programs. `stack` is the fixture of that name.
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
    """Drop caches, so that the next use reads the environment again."""
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
