"""Counts over all documents, runs, pages and remote jobs, kept as rows change.

Triggers append each change to `total_changes`; maintenance adds these to `totals`. Work in
progress is counted in indexes that hold nothing else. So no count reads what has been stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from sqlalchemy import Connection, Row, Select, delete, func, literal, select, true, union_all
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.orm import InstrumentedAttribute
from sqlalchemy.sql import ColumnElement
from sqlalchemy.sql.functions import coalesce

from rag_service.database.engine import begin, reading
from rag_service.database.models import Document, Page, RemoteJob, Run, Total, TotalChange
from rag_service.states import TERMINAL, JobState, RunState, Stage

# Changes that are added to their totals in one transaction.
_ADDED_AT_ONCE = 20_000
_ACTIVE = sorted(set(RunState) - TERMINAL)


@dataclass(frozen=True, slots=True)
class JobTotals:
    """Counts of all posts.

    `live` by RunPod's last status, or by the state of the post if there is none; `ended` by
    outcome; `gpu_seconds` and `usd` are lower bounds.
    """

    live: dict[str, int]
    ended: dict[str, int]
    gpu_seconds: float
    usd: float


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
    jobs: JobTotals


def add_changes() -> int:
    """Add the appended changes to their totals. Return how many there were."""
    added = 0
    while True:
        with begin() as connection:
            count = connection.scalar(_add_some()) or 0
        added += count
        if count < _ADDED_AT_ONCE:
            return added


def _add_some() -> Select[int]:
    chosen = select(TotalChange.id).order_by(TotalChange.id).limit(_ADDED_AT_ONCE)
    taken = (
        delete(TotalChange)
        .where(TotalChange.id.in_(chosen.with_for_update(skip_locked=True)))
        .returning(TotalChange.name, TotalChange.change)
        .cte("taken")
    )
    # In one order, so that two of these never wait for each other.
    sums = select(taken.c.name, func.sum(taken.c.change)).group_by(taken.c.name)
    insert = upsert(Total).from_select(["name", "value"], sums.order_by(taken.c.name))
    added = insert.on_conflict_do_update(
        index_elements=["name"], set_={"value": Total.value + insert.excluded.value}
    )
    return select(func.count()).select_from(taken).add_cte(added.cte("added"))


def stored_totals(connection: Connection) -> dict[str, Decimal]:
    """Return the totals by name, with the changes that are not added to them yet."""
    each = union_all(
        select(Total.name, Total.value), select(TotalChange.name, TotalChange.change)
    ).subquery()
    query = select(each.c.name, func.sum(each.c.value)).group_by(each.c.name)
    return {name: value for name, value in connection.execute(query)}


def of_kind(totals: dict[str, Decimal], kind: str) -> dict[str, int]:
    """Return the counts named `kind:word` by word."""
    named = {name.partition(":")[::2]: value for name, value in totals.items()}
    return {word: int(value) for (first, word), value in named.items() if first == kind and value}


def read_totals() -> DatabaseTotals:
    """Return all counts, read in one transaction of limited time."""
    with reading() as connection:
        stored = stored_totals(connection)
        return DatabaseTotals(
            runs=of_kind(stored, "runs") | _active_runs(connection),
            documents=of_kind(stored, "documents") | _active_documents(connection),
            pages=int(stored.get("pages", 0)),
            active_pages=_active_pages(connection),
            oldest_waiting={stage: _oldest_waiting(connection, stage) for stage in Stage},
            jobs=JobTotals(
                live=_live_jobs(connection),
                ended=of_kind(stored, "jobs"),
                gpu_seconds=float(stored.get("gpu_seconds", 0)),
                usd=float(stored.get("usd", 0)),
            ),
        )


def _active_runs(connection: Connection) -> dict[str, int]:
    query = select(Run.state, func.count()).where(_is_active(Run.state)).group_by(Run.state)
    return _by_word(connection.execute(query).all())


def _active_documents(connection: Connection) -> dict[str, int]:
    query = (
        select(Document.status, func.count())
        .where(Document.deleted_at.is_(None), Document.status.in_(_ACTIVE))
        .group_by(Document.status)
    )
    return _by_word(connection.execute(query).all())


def _active_pages(connection: Connection) -> dict[str, int]:
    """Count run by run: a join of whole tables would read every page.

    A run that was never claimed has no pages.
    """
    pages = (
        select(Page.state, func.count().label("number"))
        .where(Page.run_id == Run.id)
        .group_by(Page.state)
        .lateral()
    )
    query = (
        select(pages.c.state, func.sum(pages.c.number))
        .select_from(Run)
        .join(pages, true())
        .where(_is_active(Run.state), Run.epoch > 0)
        .group_by(pages.c.state)
    )
    return _by_word(connection.execute(query).all())


def _live_jobs(connection: Connection) -> dict[str, int]:
    status = coalesce(RemoteJob.last_status, RemoteJob.state)
    ended = literal(JobState.ENDED.value, literal_execute=True)
    query = select(status, func.count()).where(RemoteJob.state != ended).group_by(status)
    return _by_word(connection.execute(query).all())


def _is_active(state: InstrumentedAttribute[str]) -> ColumnElement[bool]:
    # Literals, so that a prepared plan may use the partial index of active runs too.
    ended = [literal(word.value, literal_execute=True) for word in sorted(TERMINAL)]
    return state.not_in(ended)


def _by_word(rows: Sequence[Row[str, int]]) -> dict[str, int]:
    return {word: int(count) for word, count in rows}


def _oldest_waiting(connection: Connection, stage: Stage) -> float:
    age = func.extract("epoch", func.clock_timestamp() - func.min(Run.created_at))
    return float(connection.scalar(select(age).where(Run.state == stage.waiting)) or 0.0)
