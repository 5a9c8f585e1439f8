"""Pages of runs: planned, taken in hand, stored as they end, reused. Used by workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import (
    ARRAY,
    Boolean,
    Connection,
    Integer,
    ScalarSelect,
    all_,
    bindparam,
    case,
    func,
    literal,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import Insert, distinct_on
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.sql import ColumnElement

from rag_service.database.engine import begin
from rag_service.database.models import Document, Page, Run
from rag_service.database.storable_text import clean, clean_tree
from rag_service.errors import RagServiceError
from rag_service.jobs.leases import ClaimedRun, fence
from rag_service.states import GOOD, PageState

# A page that is done clears its run's crash counts.
PROGRESS = {"crashes": 0, "expiries": 0}
# Columns that a reused page does not take over from the run it comes from.
_OWN = frozenset(
    {
        "run_id",
        "reused",
        "hand_epoch",
        "tries",
        "retry_at",
        "plan_reason",
        "remote_job_id",
        "repost_reason",
    }
)


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """One page as prepare leaves it: done (native, blank, no_text, failed) or pending for OCR."""

    number: int
    plan: str
    plan_reason: str
    state: PageState
    width_pt: float
    height_pt: float
    markdown: str = ""
    warnings: Sequence[dict[str, Any]] = ()
    error: RagServiceError | None = None


@dataclass(frozen=True, slots=True)
class StoredPage:
    """The outcome of one page that was read."""

    number: int
    state: PageState
    markdown: str
    columns: dict[str, Any]
    warnings: Sequence[dict[str, Any]] = ()
    error: RagServiceError | None = None
    retry_in: float | None = None
    regions: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class PendingPage:
    """A page that remains to be read."""

    number: int
    tries: int
    waits: bool


def store_plan(run: ClaimedRun, rows: Iterable[PlannedRow]) -> None:
    """Store planned pages in one transaction; a page planned before keeps what it has.

    Raises LeaseLost.
    """
    with begin() as connection:
        fence(connection, run, **PROGRESS)
        add_plan(connection, run, rows)


def add_plan(connection: Connection, run: ClaimedRun, rows: Iterable[PlannedRow]) -> None:
    """The same within a transaction that holds the run's row."""
    values = [_plan_values(run, row) for row in rows]
    if values:
        connection.execute(_planned_insert(values[0]), values)


def _planned_insert(example: dict[str, Any]) -> Insert:
    """One statement for many rows; the time of storing is the database's."""
    columns: dict[str, Any] = {name: bindparam(name) for name in example if name != "is_done"}
    columns["stored_at"] = case((bindparam("is_done", type_=Boolean), func.now()), else_=None)
    return upsert(Page).values(columns).on_conflict_do_nothing()


def _plan_values(run: ClaimedRun, row: PlannedRow) -> dict[str, Any]:
    return {
        "run_id": run.id,
        "number": row.number,
        "plan": row.plan,
        "plan_reason": clean(row.plan_reason),
        "state": row.state,
        "width_pt": row.width_pt,
        "height_pt": row.height_pt,
        "markdown": clean(row.markdown),
        "parser": run.parser,
        "fingerprint": run.fingerprint,
        "warnings": clean_tree(row.warnings),
        "is_done": row.state is not PageState.PENDING,
        **_error_values(row.error),
    }


def _error_values(error: RagServiceError | None) -> dict[str, Any]:
    if error is None:
        return {"error_code": None, "error_message": None, "error_retryable": None}
    return {
        "error_code": error.code,
        "error_message": clean(error.message),
        "error_retryable": error.retryable,
    }


def pending(run: ClaimedRun) -> list[PendingPage]:
    """Pages that remain, in order; `waits` where the page's later try is not due yet."""
    query = (
        select(Page.number, Page.tries, Page.retry_at > func.clock_timestamp())
        .where(Page.run_id == run.id, Page.state == PageState.PENDING)
        .order_by(Page.number)
    )
    with begin() as connection:
        return [PendingPage(n, t, bool(w)) for n, t, w in connection.execute(query)]


def seconds_until_due(run: ClaimedRun) -> float:
    """Seconds until the first waiting page may be tried again; 0 where one may be now."""
    due = func.extract("epoch", func.min(Page.retry_at) - func.clock_timestamp())
    query = select(due).where(Page.run_id == run.id, Page.state == PageState.PENDING)
    with begin() as connection:
        return max(0.0, float(connection.scalar(query) or 0.0))


def take_in_hand(run: ClaimedRun, number: int) -> None:
    """Note that the page is about to be sent under this claim. Raises LeaseLost."""
    with begin() as connection:
        fence(connection, run, epoch=Run.epoch)
        connection.execute(
            update(Page)
            .where(Page.run_id == run.id, Page.number == number)
            .values(hand_epoch=run.epoch)
        )


def store(run: ClaimedRun, page: StoredPage) -> None:
    """Store a page's outcome; a done page is progress and clears the run's crash counts.

    Raises LeaseLost.
    """
    again = page.retry_in is not None
    with begin() as connection:
        fence(connection, run, **({"epoch": Run.epoch} if again else PROGRESS))
        connection.execute(
            update(Page)
            .where(
                Page.run_id == run.id,
                Page.number == page.number,
                Page.state == PageState.PENDING,
            )
            .values(**_outcome_values(page))
        )


def settle_pages(connection: Connection, job_id: str, pages: Sequence[StoredPage]) -> None:
    """Store what a remote job brought: a page is written only while it is that job's own."""
    for page in pages:
        connection.execute(
            update(Page)
            .where(
                Page.remote_job_id == job_id,
                Page.number == page.number,
                Page.state == PageState.PENDING,
            )
            .values(**_outcome_values(page))
        )


def _outcome_values(page: StoredPage) -> dict[str, Any]:
    again = page.retry_in is not None
    return {
        **clean_tree(page.columns),
        **_error_values(page.error),
        "state": PageState.PENDING if again else page.state,
        "markdown": clean(page.markdown),
        "regions": clean_tree(page.regions),
        "warnings": Page.warnings.op("||")(literal(clean_tree(page.warnings), Page.warnings.type)),
        "hand_epoch": None,
        "tries": Page.tries + 1 if again else Page.tries,
        "retry_at": _due(page.retry_in),
        "stored_at": None if again else func.clock_timestamp(),
    }


def _due(retry_in: float | None) -> Any:
    return None if retry_in is None else func.clock_timestamp() + timedelta(seconds=retry_in)


def reusable(document_id: str, fingerprint: str, redo_pages: Sequence[int]) -> ColumnElement[bool]:
    """The condition under which a run with this fingerprint takes over a page of its document.

    Good pages that were read with the same options; a native or blank page is the same whatever
    reads scans, so its fingerprint is the run's too. A run that is to redo certain pages takes
    over every other good page that answers now, whatever it was read with.
    """
    fit = Page.fingerprint == fingerprint
    if redo_pages:
        redone = literal(list(redo_pages), ARRAY(Integer))
        fit = (fit | (Page.run_id == _answering(document_id))) & (Page.number != all_(redone))
    return Page.state.in_(GOOD) & fit


def _answering(document_id: str) -> ScalarSelect[str | None]:
    return select(Document.current_run_id).where(Document.id == document_id).scalar_subquery()


def reuse(run: ClaimedRun) -> int:
    """Copy the pages that are `reusable` from the document's earlier runs; how many.

    Of several, the one that answers now where pages are kept for that, else the newest run's.
    Raises LeaseLost.
    """
    answers_now = case((Page.run_id == _answering(run.document_id), 0), else_=1)
    names = [column.name for column in Page.__table__.columns if column.name not in _OWN]
    candidates = (
        select(*(getattr(Page, name) for name in names))
        .ext(distinct_on(Page.number))
        .join(Run, Run.id == Page.run_id)
        .where(
            Run.document_id == run.document_id,
            Run.id != run.id,
            reusable(run.document_id, run.fingerprint, run.redo_pages),
        )
        .order_by(Page.number, *([answers_now] if run.redo_pages else []), Run.number.desc())
        .subquery()
    )
    rows = select(
        literal(run.id),
        literal(True),
        literal("reused"),
        *(candidates.c[name] for name in names),
    )
    with begin() as connection:
        fence(connection, run, epoch=Run.epoch)
        copied = connection.scalars(
            upsert(Page)
            .from_select(["run_id", "reused", "plan_reason", *names], rows)
            .on_conflict_do_nothing()
            .returning(Page.number)
        ).all()
        # Only a page that is new here is progress; else a crash after this would never count.
        if copied:
            fence(connection, run, **PROGRESS)
        return len(copied)


def failed_numbers(connection: Connection, run_id: str) -> list[int]:
    """Pages of a run that failed, in order."""
    query = (
        select(Page.number)
        .where(Page.run_id == run_id, Page.state == PageState.FAILED)
        .order_by(Page.number)
    )
    return list(connection.scalars(query))
