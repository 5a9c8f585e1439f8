"""The whole service on servers of its own, for benchmarks and `make corpus`: one a process.

The same programs as `rag-service up` starts, on free ports and a temporary folder.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import ParamSpec, TypeVar

import psutil

from rag_service.cli.process_commands import await_postgres
from rag_service.cli.start_plan import StartPlan, embedded_ocr_environment
from rag_service.config.loader import get_settings
from rag_service.config.options import Settings
from rag_service.database import schema
from rag_service.documents.incoming_file import IncomingFile
from rag_service.documents.intake import IntakeOptions, accept, check_options
from rag_service.documents.storage import DocumentStore
from rag_service.embedded import EmbeddedStack, Program, ProgramStatus
from rag_service.embedded.folder import free_port
from rag_service.knowledgebase import document_queries, page_queries
from rag_service.knowledgebase.views import DocumentView, PageView
from rag_service.states import TERMINAL, Stage

P, T = ParamSpec("P"), TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
OCR, SERVICE = Stage.OCR.value, "whole service"
_DRAIN_SECONDS = 5.0
_POSTGRES_SECONDS = 60.0
_POLL_SECONDS = 0.5
# Where other servers, or a key that our own requests do not carry, would come from.
_NOT_OURS = ("DATABASE_URL", "REDIS_URL", "GLMOCR_BASE_URL", "RAG_SERVICE_API_KEY")


class Stack:
    """A running service: takes files in, waits for documents, shows their pages."""

    def __init__(self, settings: Settings, servers: EmbeddedStack, folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        self.plan = StartPlan(settings, folder / "logs", _DRAIN_SECONDS)
        self._servers = servers
        self._store = DocumentStore(settings)

    def start(self, programs: Iterable[Program]) -> None:
        """Start programs and wait until each is ready."""
        for program in programs:
            self._servers.supervisor.start(program)

    def programs(self) -> list[ProgramStatus]:
        """Every program, the servers included, with its restarts."""
        return self._servers.supervisor.status()

    def trees(self) -> dict[str, list[int]]:
        """Roots of the ocr worker's processes and of everybody's, for benchmarks/peers/trees.py."""
        running = [(program.name, program.pid) for program in self.programs() if program.pid]
        ocr = [pid for name, pid in running if name == OCR]
        return {OCR: ocr, SERVICE: [pid for _, pid in running]}

    @contextmanager
    def held_back(self, name: str) -> Iterator[None]:
        """Stop a program and all it started for the length of the block, so that work piles up."""
        main = next(psutil.Process(p.pid) for p in self.programs() if p.name == name and p.pid)
        family = [main, *main.children(recursive=True)]
        for process in family:
            process.suspend()
        try:
            yield
        finally:
            for process in family:
                process.resume()

    def options(self, *, ocr: str = "auto", priority: str = "bulk") -> IntakeOptions:
        return check_options(self.settings, ocr=ocr, priority=priority)

    def take_in(self, path: Path, options: IntakeOptions) -> str:
        """Hand a file to intake; return the document's id."""
        with IncomingFile(self.settings, self._store.incoming()) as incoming:
            with path.open("rb") as file:
                incoming.copy_from(file)
            return accept(self.settings, self._store, incoming, path.name, options).id

    def view(self, document_id: str) -> DocumentView:
        view = document_queries.get_document(document_id, self.settings.ocr.base_url)
        if view is None:
            raise LookupError(f"Document {document_id} is gone.")
        return view

    def wait(self, ids: Iterable[str], seconds: float) -> list[DocumentView]:
        """Documents in the order of their ids when the last has ended. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        ended = []
        for document_id in ids:
            while (view := self.view(document_id)).latest_run.status not in TERMINAL:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{view.filename} is {view.status} after {seconds:.0f} s.")
                time.sleep(_POLL_SECONDS)
            ended.append(view)
        return ended

    def pages(self, document_id: str) -> list[PageView]:
        """Every page of the run that answers for the document."""
        run_id = page_queries.shown_run_id(document_id)
        most = self.settings.limits.max_pages
        return page_queries.list_pages(run_id, limit=most) if run_id else []


def apart(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the function's result from a fresh process of its own.

    For one stack after another, since connections to a database outlive the stack they were for,
    and for code that must run without the service's modules.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *args, **kwargs).result()


@contextmanager
def running_stack(*, durable: bool, ocr: Mapping[str, str] | None = None) -> Iterator[Stack]:
    """PostgreSQL and Valkey, migrated; the caller starts the programs that it needs.

    `durable`: writes are flushed as `up` flushes them, else as the throw-away `run` does.
    `ocr`: the variables of an OCR server in place of the embedded one's.
    """
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="rag-bench-") as name:
        folder = Path(name)
        # PostgreSQL does not run as root and must pass through to its data.
        folder.chmod(0o711)
        try:
            _set_environment(folder, ocr)
            with EmbeddedStack(get_settings(), folder, durable=durable) as servers:
                os.environ.update(servers.start_servers())
                get_settings.cache_clear()
                await_postgres(_POSTGRES_SECONDS)
                schema.migrate()
                yield Stack(get_settings(), servers, folder)
        finally:
            os.environ.clear()
            os.environ.update(before)
            get_settings.cache_clear()


def _set_environment(folder: Path, ocr: Mapping[str, str] | None) -> None:
    for name in _NOT_OURS:
        os.environ.pop(name, None)
        os.environ.pop(name + "_FILE", None)
    os.environ["RAG_SERVICE_DATA_DIR"] = str(folder)
    os.environ["RAG_SERVICE_STORAGE_URL"] = (folder / "documents").as_uri()
    os.environ["RAG_SERVICE_API_PORT"] = str(free_port())
    get_settings.cache_clear()
    if ocr is None:
        ocr = embedded_ocr_environment(get_settings(), "127.0.0.1", free_port())
    os.environ.update(ocr)
    get_settings.cache_clear()
