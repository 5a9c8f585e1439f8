"""Pages of a run: planned, in progress, stored when they end, reused from earlier runs."""

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
from rag_service.jobs.leases import ClaimedRun, fence, time_spent
from rag_service.runtime.time_spent import TimeSpent
from rag_service.states import GOOD, PageState

# A page that is done resets its run's crash counts.
PROGRESS = {"crashes": 0, "expiries": 0, "progress_at": func.clock_timestamp()}
# Columns that a reused page does not copy from its earlier run.
_NOT_COPIED = frozenset(
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
    """One page after prepare: done (native, blank, no_text, failed) or pending for OCR."""

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
    """The outcome of one page; with `retry_in` (seconds) it stays pending for a later try."""

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
    """A page that remains to be read; `waits`: its later try is not due yet."""

    number: int
    tries: int
    waits: bool


def store_plan(run: ClaimedRun, rows: Iterable[PlannedRow], spent: TimeSpent | None = None) -> None:
    """Store planned pages in one transaction; a page that has a row is not changed.

    `spent` is stored with them; None changes nothing. Raises LeaseLost.
    """
    with begin() as connection:
        fence(connection, run, **PROGRESS, **time_spent(spent))
        add_plan(connection, run, rows)


def add_plan(connection: Connection, run: ClaimedRun, rows: Iterable[PlannedRow]) -> None:
    """Store planned pages within a transaction that has locked the run's row."""
    values = [_plan_values(run, row) for row in rows]
    if values:
        connection.execute(_planned_insert(values[0]), values)


def _planned_insert(example: dict[str, Any]) -> Insert:
    """Return one statement for many rows; `stored_at` is set by the database's clock."""
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
    """Return the pages that remain to be read, in order."""
    query = (
        select(Page.number, Page.tries, Page.retry_at > func.clock_timestamp())
        .where(Page.run_id == run.id, Page.state == PageState.PENDING)
        .order_by(Page.number)
    )
    with begin() as connection:
        return [PendingPage(n, t, bool(w)) for n, t, w in connection.execute(query)]


def seconds_until_due(run: ClaimedRun) -> float:
    """Return the seconds until the first waiting page may be tried again; 0 if one may be now."""
    due = func.extract("epoch", func.min(Page.retry_at) - func.clock_timestamp())
    query = select(due).where(Page.run_id == run.id, Page.state == PageState.PENDING)
    with begin() as connection:
        return max(0.0, float(connection.scalar(query) or 0.0))


def mark_in_progress(run: ClaimedRun, number: int) -> None:
    """Store that the page is about to be sent under this lease. Raises LeaseLost."""
    with begin() as connection:
        fence(connection, run, epoch=Run.epoch)
        connection.execute(
            update(Page)
            .where(Page.run_id == run.id, Page.number == number)
            .values(hand_epoch=run.epoch)
        )


def store(run: ClaimedRun, page: StoredPage, spent: TimeSpent | None = None) -> None:
    """Store a page's outcome; a done page resets the run's crash counts.

    `spent` is stored with it; None changes nothing. Raises LeaseLost.
    """
    is_pending = page.retry_in is not None
    with begin() as connection:
        progress = {"epoch": Run.epoch} if is_pending else PROGRESS
        fence(connection, run, **progress, **time_spent(spent))
        connection.execute(
            update(Page)
            .where(
                Page.run_id == run.id,
                Page.number == page.number,
                Page.state == PageState.PENDING,
            )
            .values(**_outcome_values(page))
        )


def store_job_pages(connection: Connection, job_id: str, pages: Sequence[StoredPage]) -> None:
    """Store the pages of a remote job; a page that another job has claimed is not changed."""
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
    is_pending = page.retry_in is not None
    return {
        **clean_tree(page.columns),
        **_error_values(page.error),
        "state": PageState.PENDING if is_pending else page.state,
        "markdown": clean(page.markdown),
        "regions": clean_tree(page.regions),
        "warnings": Page.warnings.op("||")(literal(clean_tree(page.warnings), Page.warnings.type)),
        "hand_epoch": None,
        "tries": Page.tries + 1 if is_pending else Page.tries,
        "retry_at": _retry_time(page.retry_in),
        "stored_at": None if is_pending else func.clock_timestamp(),
    }


def _retry_time(retry_in: float | None) -> Any:
    return None if retry_in is None else func.clock_timestamp() + timedelta(seconds=retry_in)


def reusable(document_id: str, fingerprint: str, redo_pages: Sequence[int]) -> ColumnElement[bool]:
    """Return the condition that a run with this fingerprint reuses a page of its document.

    It reuses good pages that were read with the same options. A native or blank page has its
    run's fingerprint too, although its text does not depend on the OCR options. A run that redoes
    certain pages reuses every other good page of the current run, whatever its options were.
    """
    fit = Page.fingerprint == fingerprint
    if redo_pages:
        redone = literal(list(redo_pages), ARRAY(Integer))
        fit = (fit | (Page.run_id == _current_run(document_id))) & (Page.number != all_(redone))
    return Page.state.in_(GOOD) & fit


def _current_run(document_id: str) -> ScalarSelect[str | None]:
    return select(Document.current_run_id).where(Document.id == document_id).scalar_subquery()


def reuse(run: ClaimedRun) -> int:
    """Copy the pages that are `reusable` from the document's earlier runs. Return their number.

    Of several copies of a page, the newest run's is taken; if certain pages are redone, the
    current run's comes first. Raises LeaseLost.
    """
    is_current = case((Page.run_id == _current_run(run.document_id), 0), else_=1)
    names = [column.name for column in Page.__table__.columns if column.name not in _NOT_COPIED]
    candidates = (
        select(*(getattr(Page, name) for name in names))
        .ext(distinct_on(Page.number))
        .join(Run, Run.id == Page.run_id)
        .where(
            Run.document_id == run.document_id,
            Run.id != run.id,
            reusable(run.document_id, run.fingerprint, run.redo_pages),
        )
        .order_by(Page.number, *([is_current] if run.redo_pages else []), Run.number.desc())
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
        # No progress if nothing was copied: else a crash after this would never be counted.
        if copied:
            fence(connection, run, **PROGRESS)
        return len(copied)


def failed_numbers(connection: Connection, run_id: str) -> list[int]:
    """Return the numbers of a run's failed pages, in order."""
    query = (
        select(Page.number)
        .where(Page.run_id == run_id, Page.state == PageState.FAILED)
        .order_by(Page.number)
    )
    return list(connection.scalars(query))
