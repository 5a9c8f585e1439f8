"""Life of a run: added, handed to OCR, finished, failed, cancelled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Select, func, literal, select
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.exc import IntegrityError

from rag_service.database.engine import autocommit, begin
from rag_service.database.models import Document, Page, Run, new_id
from rag_service.database.storable_text import clean_tree
from rag_service.errors import AlreadyActive, LeaseLost, NotFound, PagesFailed, RagServiceError
from rag_service.jobs.claim_conditions import claimable
from rag_service.jobs.endings import UNCLAIMED, WORKED, end_run
from rag_service.jobs.leases import ClaimedRun, fence, time_spent
from rag_service.jobs.run_pages import PROGRESS, PlannedRow, add_plan, failed_numbers
from rag_service.runtime.time_spent import TimeSpent
from rag_service.states import TERMINAL, LayoutMode, PageState, Priority, RunState, Stage

_TERMINAL_WORDS = [literal(state.value, literal_execute=True) for state in sorted(TERMINAL)]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a document is read. Two runs with equal options may share pages."""

    parser: str
    model: str
    ocr: str
    dpi: int
    layout: LayoutMode

    @property
    def fingerprint(self) -> str:
        """Digest of the options; equal digests mean equal pages."""
        canonical = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class ClaimableRun:
    """A run that may be claimed; a wake-up message names it so that Flower can show it."""

    run_id: str
    filename: str


def add_run(
    connection: Connection,
    document_id: str,
    options: RunOptions,
    priority: int,
    *,
    reuse_pages: bool = True,
    redo_pages: Sequence[int] = (),
    reprocess_job_id: str | None = None,
) -> str:
    """Insert a queued run of a document that has no active one. Return its id.

    It reuses pages as `run_pages.reusable` says, or none if `reuse_pages` is false. Raises
    AlreadyActive, and NotFound if the document was deleted meanwhile: roll back then.
    """
    run_id = new_id()
    number = select(func.coalesce(func.max(Run.number), 0) + 1).where(
        Run.document_id == document_id
    )
    row = upsert(Run).values(
        id=run_id,
        document_id=document_id,
        number=number.scalar_subquery(),
        fingerprint=options.fingerprint,
        priority=priority,
        reuse_pages=reuse_pages,
        redo_pages=list(redo_pages),
        reprocess_job_id=reprocess_job_id,
        **asdict(options),
    )
    try:
        # The unique indexes decide between two concurrent calls.
        added = connection.scalar(row.on_conflict_do_nothing().returning(Run.id))
    except IntegrityError as error:
        raise NotFound() from error
    if added is None:
        raise AlreadyActive()
    _require_undeleted(connection, document_id)
    return run_id


def _require_undeleted(connection: Connection, document_id: str) -> None:
    """Lock the document's row, so that a delete comes before this run or cancels it."""
    undeleted = (
        select(Document.id)
        .where(Document.id == document_id, Document.deleted_at.is_(None))
        .with_for_update(read=True)
    )
    if connection.scalar(undeleted) is None:
        raise NotFound()


def store_preflight(
    run: ClaimedRun, page_count: int, warnings: Sequence[dict[str, Any]]
) -> dict[int, PageState]:
    """Store the page count and the warnings of preflight.

    Return the states of the pages that are already planned, by an earlier claim or by reuse, by
    page number. Raises LeaseLost.
    """
    planned = select(Page.number, Page.state).where(Page.run_id == run.id)
    with begin() as connection:
        fence(connection, run, page_count=page_count, warnings=clean_tree(warnings))
        if run.epoch == 1 and not run.reuse_pages:
            return {}
        return {number: PageState(state) for number, state in connection.execute(planned)}


def add_warnings(run: ClaimedRun, warnings: Sequence[dict[str, Any]]) -> None:
    """Add warnings to the run, each once. Raises LeaseLost."""
    with begin() as connection:
        fence(connection, run, epoch=Run.epoch)
        stored = connection.scalar(select(Run.warnings).where(Run.id == run.id)) or []
        new = [warning for warning in clean_tree(warnings) if warning not in stored]
        if new:
            fence(connection, run, warnings=stored + new)


def hand_to_ocr(run: ClaimedRun, rows: Sequence[PlannedRow] = ()) -> None:
    """Store the last planned pages and release the run to the OCR stage. Raises LeaseLost.

    The time that its pages took counts from 0 in that stage.
    """
    with begin() as connection:
        fence(
            connection,
            run,
            state=RunState.READY,
            ready_at=func.clock_timestamp(),
            worked_seconds=WORKED,
            **time_spent(TimeSpent()),
            **UNCLAIMED,
            **(PROGRESS if rows else {}),
        )
        add_plan(connection, run, rows)


def finish(run: ClaimedRun, rows: Sequence[PlannedRow] = ()) -> RunState:
    """Store the last planned pages and end the run: failed if a page failed, else processed.

    Raises LeaseLost, also if the run was cancelled.
    """
    with begin() as connection:
        fence(connection, run, state=RunState.FINISHING, **(PROGRESS if rows else {}))
        add_plan(connection, run, rows)
        failed = failed_numbers(connection, run.id)
        state = RunState.FAILED if failed else RunState.PROCESSED
        error = pages_failed(connection, run.id, failed) if failed else None
        if not end_run(connection, run.id, state, error, epoch=run.epoch):
            raise LeaseLost()
    return state


def pages_failed(connection: Connection, run_id: str, numbers: Sequence[int]) -> RagServiceError:
    """Return the error of a run with failed pages: their numbers and causes."""
    query = (
        select(
            Page.error_code,
            func.count(),
            func.min(Page.error_message),
            func.bool_and(func.coalesce(Page.error_retryable, False)),
        )
        .where(Page.run_id == run_id, Page.state == PageState.FAILED)
        .group_by(Page.error_code)
        .order_by(func.count().desc())
    )
    found = connection.execute(query).all()
    causes = [f"{count} x {code}: {message}" for code, count, message, _ in found]
    total = connection.scalar(select(func.count()).where(Page.run_id == run_id))
    shown = ", ".join(map(str, numbers[:20])) + (", …" if len(numbers) > 20 else "")
    error = PagesFailed(
        f"{len(numbers)} of {total} pages could not be read (page {shown}): {'; '.join(causes)}"
    )
    # A reprocess may help if it may help every failed page.
    error.retryable = all(retryable for *_, retryable in found)
    return error


def fail(run: ClaimedRun, error: RagServiceError) -> None:
    """End the run as failed. Raises LeaseLost."""
    with begin() as connection:
        if not end_run(connection, run.id, RunState.FAILED, error, epoch=run.epoch):
            raise LeaseLost()


def cancel(connection: Connection, document_id: str, error: RagServiceError) -> bool:
    """Cancel the document's active run. Return False if there is none.

    The fork that holds it finds out at its next renewal or write.
    """
    run_id = connection.scalar(active_run(document_id))
    return run_id is not None and end_run(connection, run_id, RunState.CANCELLED, error)


def active_run(document_id: str) -> Select[str]:
    """Return the query for a document's non-terminal run."""
    return select(Run.id).where(Run.document_id == document_id, Run.state.not_in(TERMINAL))


def next_claimable(stage: Stage, server: str | None, limit: int) -> list[ClaimableRun]:
    """Return up to `limit` runs of a stage that may be claimed now, in claim order."""
    with autocommit() as connection:
        found = connection.execute(_next_claimable(stage, server, limit))
        return [ClaimableRun(*row) for row in found]


@lru_cache
def _next_claimable(stage: Stage, server: str | None, limit: int) -> Select[str, str]:
    return (
        select(Run.id, Document.filename)
        .join(Document, Document.id == Run.document_id)
        .where(claimable(stage, server))
        .order_by(Run.priority, Run.queued_at, Run.id)
        .limit(limit)
    )


def backlog(connection: Connection, most: int, priority: Priority) -> int:
    """Return the number of runs of a priority that are not terminal, or `most` if more."""
    active = (
        select(Run.id)
        .where(Run.state.in_(sorted(set(RunState) - TERMINAL)), Run.priority == priority)
        # As the partial index has it.
        .where(Run.state.not_in(_TERMINAL_WORDS))
        .limit(most)
        .subquery()
    )
    return connection.scalar(select(func.count()).select_from(active)) or 0
