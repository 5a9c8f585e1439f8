"""What workers do to the knowledgebase, step by step and without Celery."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sqlalchemy import Row, select, text

from rag_service.config.loader import get_settings
from rag_service.config.options import LeaseOptions
from rag_service.database import document_rows
from rag_service.database.document_rows import NewDocument
from rag_service.database.engine import begin
from rag_service.database.models import Page
from rag_service.errors import PageUnrenderable
from rag_service.jobs import leases, run_pages, runs
from rag_service.jobs.leases import Claimant, ClaimedRun
from rag_service.jobs.run_pages import PlannedRow, StoredPage
from rag_service.jobs.runs import RunOptions
from rag_service.states import LayoutMode, PageState, Priority, Stage

OPTIONS = RunOptions(parser="glmocr", model="glm-ocr", ocr="auto", dpi=150, layout=LayoutMode.AUTO)
OTHER_OPTIONS = RunOptions(
    parser="glmocr", model="glm-ocr", ocr="force", dpi=150, layout=LayoutMode.AUTO
)


def lease(**changes: float) -> LeaseOptions:
    return get_settings().lease.model_copy(update=changes)


def add_document(
    priority: Priority = Priority.BULK,
    *,
    collection: str = "default",
    sha256: str | None = None,
    options: RunOptions = OPTIONS,
) -> str:
    """A document with a queued run; its id."""
    document_id = insert_document(collection=collection, sha256=sha256)
    with begin() as connection:
        runs.add_run(connection, document_id, options, priority)
    return document_id


def insert_document(*, collection: str = "default", sha256: str | None = None) -> str:
    """A document without a run; its id."""
    new = NewDocument(collection, sha256 or uuid.uuid4().hex * 2, "a.pdf", "application/pdf", 10)
    with begin() as connection:
        key = f"sha256/{new.sha256[:2]}/{new.sha256}"
        return document_rows.insert_document(connection, new, key)


def add_run(document_id: str, options: RunOptions = OPTIONS, **wishes: Any) -> str:
    with begin() as connection:
        return runs.add_run(connection, document_id, options, Priority.BULK, **wishes)


def try_claim(
    stage: Stage = Stage.PREPARE,
    worker: str = "worker",
    *,
    forks: int = 100,
    task: str | None = None,
    server: str | None = None,
) -> ClaimedRun | None:
    claimant = Claimant(worker, task or uuid.uuid4().hex, forks)
    return leases.claim(stage, claimant, lease(), server=server)


def claim(stage: Stage = Stage.PREPARE, worker: str = "worker", **wishes: Any) -> ClaimedRun:
    run = try_claim(stage, worker, **wishes)
    assert run is not None, "no run to claim"
    return run


def planned(number: int, state: PageState, text_: str = "some text") -> PlannedRow:
    plan = {PageState.NATIVE: "native", PageState.BLANK: "blank"}.get(state, "ocr")
    failed = state is PageState.FAILED
    return PlannedRow(
        number,
        plan,
        "a reason",
        state,
        595,
        842,
        markdown="" if state in (PageState.PENDING, PageState.FAILED) else text_,
        error=PageUnrenderable() if failed else None,
    )


def plan(run: ClaimedRun, *states: PageState) -> None:
    """Store the plan of pages 1 to n, as prepare does."""
    runs.store_preflight(run, len(states), [])
    rows = [planned(number, state) for number, state in enumerate(states, start=1)]
    run_pages.store_plan(run, rows)


def read(run: ClaimedRun, number: int, state: PageState = PageState.OCR, **more: Any) -> None:
    """Store what came of a page, as ocr does."""
    failed = state is PageState.FAILED
    outcome = StoredPage(
        number,
        state,
        "" if failed else f"text of {number}",
        more.pop("columns", {}),
        error=PageUnrenderable() if failed else None,
        **more,
    )
    run_pages.store(run, outcome)


def ready_run(*others: PageState, **wishes: Any) -> ClaimedRun:
    """A run that waits for ocr, with one page pending and these; as its prepare worker had it."""
    add_document(**wishes)
    run = claim()
    plan(run, PageState.PENDING, *others)
    runs.hand_to_ocr(run)
    return run


def processed_document(*states: PageState, options: RunOptions = OPTIONS) -> str:
    """A document whose run has ended with these pages."""
    document_id = add_document(options=options)
    run = claim()
    plan(run, *states)
    runs.finish(run)
    return document_id


def run_row(run_id: str) -> Row[Any]:
    return one("SELECT * FROM runs WHERE id = :id", id=run_id)


def newest_run(document_id: str) -> Row[Any]:
    query = "SELECT * FROM runs WHERE document_id = :id ORDER BY number DESC LIMIT 1"
    return one(query, id=document_id)


def document_row(document_id: str) -> Row[Any]:
    return one("SELECT * FROM documents WHERE id = :id", id=document_id)


def page_row(run_id: str, number: int) -> Row[Any]:
    return one("SELECT * FROM pages WHERE run_id = :id AND number = :n", id=run_id, n=number)


def one(query: str, **values: Any) -> Row[Any]:
    with begin() as connection:
        return connection.execute(text(query), values).one()


def rows(query: str, **values: Any) -> Sequence[Row[Any]]:
    with begin() as connection:
        return connection.execute(text(query), values).all()


def execute(statement: str, **values: Any) -> None:
    with begin() as connection:
        connection.execute(text(statement), values)


def everything() -> dict[str, Sequence[Row[Any]]]:
    """All that workers may change, for comparing before and after."""
    queries = {
        "documents": "SELECT * FROM documents ORDER BY id",
        "runs": "SELECT * FROM runs ORDER BY id",
        "pages": "SELECT * FROM pages ORDER BY run_id, number",
        "servers": "SELECT * FROM ocr_servers ORDER BY url",
    }
    with begin() as connection:
        return {name: connection.execute(text(query)).all() for name, query in queries.items()}


def outlast(run_id: str) -> None:
    """Let the time of the run's lease be over."""
    execute("UPDATE runs SET lease_expires_at = now() - interval '1 s' WHERE id = :id", id=run_id)


def expire(run_id: str) -> int:
    """Let the run's lease expire and maintenance notice; how many runs were released.

    The lease time is short because the tests' PostgreSQL has only just started.
    """
    outlast(run_id)
    return leases.release_expired(lease(seconds=0.001))


def at_once(*actions: Callable[[], Any]) -> list[Any]:
    """Run the actions at the same time, a thread each; what each returned or raised."""
    barrier = threading.Barrier(len(actions))

    def run(action: Callable[[], Any]) -> Any:
        barrier.wait()
        try:
            return action()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(actions)) as pool:
        return list(pool.map(run, actions))


def wait_until_blocked(count: int = 1) -> None:
    """Return when that many of the database's sessions wait for a lock."""
    query = (
        "SELECT count(*) AS blocked FROM pg_stat_activity "
        "WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    pause = threading.Event()
    while one(query).blocked < count:
        pause.wait(0.01)


def planned_numbers(run: ClaimedRun) -> set[int]:
    """Pages of the run that have a plan."""
    query = select(Page.number).where(Page.run_id == run.id)
    with begin() as connection:
        return set(connection.scalars(query))
