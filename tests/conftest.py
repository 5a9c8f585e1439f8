"""Real servers for all tests: one PostgreSQL and one Valkey, emptied before each test."""

from __future__ import annotations

import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import httpx
import hypothesis
import pymupdf
import pytest
import redis
import uvicorn
from sqlalchemy import NullPool, create_engine, make_url, text

from rag_service.api.app import create_app
from rag_service.config.loader import get_settings, load_settings
from rag_service.config.options import Settings
from rag_service.database import engine
from rag_service.database.models import Base
from rag_service.database.schema import migrate
from rag_service.embedded import EmbeddedStack
from rag_service.errors import RagServiceError
from rag_service.jobs import leases, run_pages, runs, wake_ups
from rag_service.jobs.leases import Claimant
from rag_service.jobs.run_pages import PlannedRow
from rag_service.states import PageState, RunState, Stage
from workers import store_watch

# A busy machine may take longer for an example than Hypothesis allows by default.
hypothesis.settings.register_profile("no_deadline", deadline=None)
hypothesis.settings.load_profile("no_deadline")

# Connections of a process that the previous test killed must not block this test.
_END_OTHERS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
)
_EMPTY_ALL = "TRUNCATE " + ", ".join(table.name for table in Base.metadata.sorted_tables)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """DATABASE_URL and REDIS_URL of the session's own servers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DATABASE_URL", raising=False)
        patch.delenv("REDIS_URL", raising=False)
        settings = load_settings()
    with EmbeddedStack(settings, tmp_path_factory.mktemp("stack"), durable=False) as servers:
        yield servers.start_servers()


@pytest.fixture(scope="session")
def migrated(stack: dict[str, str]) -> str:
    """The URL of a migrated database. `database` empties it: creating one takes longer."""
    _administer(stack["DATABASE_URL"], "CREATE DATABASE tests")
    url = make_url(stack["DATABASE_URL"]).set(database="tests").render_as_string(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATABASE_URL", url)
        forget_connections()
        migrate()
    forget_connections()
    return url


@pytest.fixture
def database(
    stack: dict[str, str], migrated: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """An empty migrated database and an empty broker, set in the environment."""
    _administer(migrated, _END_OTHERS, _EMPTY_ALL)
    with closing(redis.Redis.from_url(stack["REDIS_URL"])) as client:
        client.flushall()
    monkeypatch.setenv("DATABASE_URL", migrated)
    monkeypatch.setenv("REDIS_URL", stack["REDIS_URL"])
    forget_connections()
    yield migrated
    forget_connections()


@pytest.fixture
def settings(
    database: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Settings:
    """The settings of a service with the empty database and its own data folder."""
    monkeypatch.setenv("RAG_SERVICE_DATA_DIR", str(tmp_path_factory.mktemp("data")))
    get_settings.cache_clear()
    return get_settings()


@pytest.fixture
def environment(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that sets variables as if this process had been started with them."""

    def change(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        forget_connections()

    return change


def forget_connections() -> None:
    """Drop caches, so that the next use reads the environment again."""
    for open_engine in engine._engines.values():
        open_engine.dispose()
    engine._engines.clear()
    wake_ups._sender.cache_clear()
    store_watch._store_of.cache_clear()
    get_settings.cache_clear()


def _administer(url: str, *statements: str) -> None:
    admin = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with admin.connect() as connection:
        for statement in statements:
            connection.execute(text(statement))


@dataclass(frozen=True)
class Api:
    """A running API and a client for it."""

    url: str
    port: int
    settings: Settings
    client: httpx.Client

    def upload(self, content: bytes, filename: str = "a.pdf", **options: str) -> httpx.Response:
        return self.client.post("/documents", files={"file": (filename, content)}, data=options)

    def add(self, content: bytes, **options: str) -> str:
        """Upload a document that must be accepted; return its ID."""
        answer = self.upload(content, **options)
        assert answer.status_code == 202, answer.text
        return answer.json()["id"]

    def get(self, document_id: str) -> dict:
        return self.client.get(f"/documents/{document_id}").json()


@pytest.fixture
def start_api(settings: Settings) -> Iterator[Callable[..., Api]]:
    """A function that starts the API; `start_api(limits={"max_bytes": 9})` changes settings."""
    running: list[tuple[uvicorn.Server, threading.Thread, httpx.Client]] = []

    def start(**changes: dict) -> Api:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        changed = changed_settings(
            settings, **{**changes, "api": {"port": port, **changes.get("api", {})}}
        )
        config = uvicorn.Config(create_app(changed), log_config=None, proxy_headers=False)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started and thread.is_alive():
            thread.join(0.01)
        url = f"http://127.0.0.1:{port}"
        client = httpx.Client(base_url=url, timeout=120)
        running.append((server, thread, client))
        return Api(url, port, changed, client)

    yield start
    for server, thread, client in running:
        client.close()
        server.should_exit = True
        thread.join()


@pytest.fixture
def api(start_api: Callable[..., Api]) -> Api:
    """The API without a key."""
    return start_api()


def changed_settings(settings: Settings, **sections: dict) -> Settings:
    """Return changed settings: changed_settings(settings, limits={"max_bytes": 9})."""
    changed = {
        name: getattr(settings, name).model_copy(update=values) for name, values in sections.items()
    }
    return settings.model_copy(update=changed)


@pytest.fixture
def make_pdf() -> Callable[..., bytes]:
    """A function that makes a PDF, one text per page, encrypted if there is a password."""

    def make(*texts: str, password: str | None = None) -> bytes:
        document = pymupdf.open()
        for page_text in texts:
            document.new_page().insert_text((72, 72), page_text)
        if password is None:
            return document.tobytes()
        encryption = pymupdf.PDF_ENCRYPT_AES_256
        return document.tobytes(encryption=encryption, user_pw=password, owner_pw=password)

    return make


@pytest.fixture
def work_off(settings: Settings) -> Callable[..., RunState]:
    """A function that does a prepare worker's work on the best run: stores pages, ends the run.

    Each page is given as its text, or as the error that it ends with.
    """

    def work(*contents: str | RagServiceError, error: RagServiceError | None = None) -> RunState:
        claimant = Claimant("a-worker", uuid.uuid4().hex, 4)
        run = leases.claim(Stage.PREPARE, claimant, settings.lease, server=None)
        assert run is not None
        if error is not None:
            runs.fail(run, error)
            return RunState.FAILED
        runs.store_preflight(run, len(contents), [])
        run_pages.store_plan(run, _rows(contents))
        return runs.finish(run)

    return work


def _rows(contents: Sequence[str | RagServiceError]) -> list[PlannedRow]:
    return [
        PlannedRow(number, "ocr", "", PageState.FAILED, 595, 842, error=content)
        if isinstance(content, RagServiceError)
        else PlannedRow(number, "native", "", PageState.NATIVE, 595, 842, markdown=content)
        for number, content in enumerate(contents, start=1)
    ]
