"""Counts over all documents, for metrics."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, select
from sqlalchemy.sql.functions import coalesce

from rag_service.database.engine import begin
from rag_service.database.models import Document, Page, Run
from rag_service.states import TERMINAL, Stage


@dataclass(frozen=True, slots=True)
class DatabaseTotals:
    """Counts at one moment.

    `runs` and `documents` by state; `pages` of all current runs; `active_pages` by state, of runs
    that have not ended; `oldest_waiting`: seconds since the oldest waiting run was added, by
    stage.
    """

    runs: dict[str, int]
    documents: dict[str, int]
    pages: int
    active_pages: dict[str, int]
    oldest_waiting: dict[Stage, float]


def read_totals() -> DatabaseTotals:
    """Return all counts, read in one transaction."""
    with begin() as connection:
        return DatabaseTotals(
            runs=_runs(connection),
            documents=_documents(connection),
            pages=_pages(connection),
            active_pages=_active_pages(connection),
            oldest_waiting={stage: _oldest_waiting(connection, stage) for stage in Stage},
        )


def _runs(connection: Connection) -> dict[str, int]:
    query = select(Run.state, func.count()).group_by(Run.state)
    return {state: count for state, count in connection.execute(query)}


def _documents(connection: Connection) -> dict[str, int]:
    """Count documents by the state of the current run, else of the newest run."""
    newest = (
        select(Run.state)
        .where(Run.document_id == Document.id)
        .order_by(Run.number.desc())
        .limit(1)
        .correlate(Document)
        .scalar_subquery()
    )
    current = (
        select(Run.state)
        .where(Run.id == Document.current_run_id)
        .correlate(Document)
        .scalar_subquery()
    )
    status = coalesce(current, newest).label("status")
    each = select(status).where(Document.deleted_at.is_(None)).subquery()
    query = select(each.c.status, func.count()).group_by(each.c.status)
    return {state: count for state, count in connection.execute(query)}


def _pages(connection: Connection) -> int:
    """Sum the runs' page counts: counting page rows would read the whole table."""
    query = (
        select(func.sum(Run.page_count))
        .join(Document, Document.current_run_id == Run.id)
        .where(Document.deleted_at.is_(None))
    )
    return connection.scalar(query) or 0


def _active_pages(connection: Connection) -> dict[str, int]:
    query = (
        select(Page.state, func.count())
        .join(Run, Run.id == Page.run_id)
        .where(Run.state.not_in(TERMINAL))
        .group_by(Page.state)
    )
    return {state: count for state, count in connection.execute(query)}


def _oldest_waiting(connection: Connection, stage: Stage) -> float:
    age = func.extract("epoch", func.clock_timestamp() - func.min(Run.created_at))
    return float(connection.scalar(select(age).where(Run.state == stage.waiting)) or 0.0)
