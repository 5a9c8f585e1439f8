"""Rows of reprocess jobs: added with their documents, handled in batches, cancelled, listed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, Select, delete, func, insert, literal, select, update

from rag_service.database.engine import begin, reading
from rag_service.database.models import ReprocessItem, ReprocessJob, Run, new_id
from rag_service.errors import NotFound
from rag_service.knowledgebase.selection import Selectors, numbered_ids
from rag_service.knowledgebase.views import Action, ReprocessJobView
from rag_service.states import TERMINAL, Priority, ReprocessState, RunState

_KEPT_DAYS = 30
_REMOVED_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class LockedJob:
    """A running job whose row this transaction has locked."""

    id: str
    request: Mapping[str, Any]
    priority: Priority


def add_job(selectors: Selectors, request: Mapping[str, Any], priority: Priority) -> str:
    """Add a job for the documents that are selected now. Return its id."""
    job_id = new_id()
    numbered = numbered_ids(selectors).subquery()
    place, document_id = numbered.c
    items = select(literal(job_id), place, document_id)
    with begin() as connection:
        columns = ["job_id", "position", "document_id"]
        connection.execute(insert(ReprocessItem).from_select(columns, items))
        connection.execute(
            insert(ReprocessJob).values(
                id=job_id,
                state=ReprocessState.RUNNING,
                request=dict(request),
                priority=priority,
                total=_documents_left(job_id).scalar_subquery(),
                counts={},
            )
        )
    return job_id


def _documents_left(job_id: str) -> Select[int]:
    return select(func.count()).select_from(ReprocessItem).where(ReprocessItem.job_id == job_id)


def running() -> list[str]:
    """Return the ids of the running jobs, oldest first."""
    query = select(ReprocessJob.id).where(ReprocessJob.state == ReprocessState.RUNNING)
    with begin() as connection:
        return list(connection.scalars(query.order_by(ReprocessJob.created_at, ReprocessJob.id)))


def lock(connection: Connection, job_id: str) -> LockedJob | None:
    """Lock the job. Return None if it has ended or another transaction has it."""
    query = (
        select(ReprocessJob.request, ReprocessJob.priority)
        .where(ReprocessJob.id == job_id, ReprocessJob.state == ReprocessState.RUNNING)
        .with_for_update(skip_locked=True)
    )
    row = connection.execute(query).one_or_none()
    return LockedJob(job_id, row.request, Priority(row.priority)) if row else None


def is_complete(connection: Connection, job: LockedJob) -> bool:
    """Return whether no document is left."""
    left = select(ReprocessItem.position).where(ReprocessItem.job_id == job.id)
    return connection.scalar(left.limit(1)) is None


def take_documents(connection: Connection, job: LockedJob, most: int) -> list[str]:
    """Remove the next documents, at most `most`, from the job's list. Return their ids."""
    first = (
        select(ReprocessItem.position)
        .where(ReprocessItem.job_id == job.id)
        .order_by(ReprocessItem.position)
        .limit(most)
    )
    taken = (
        delete(ReprocessItem)
        .where(ReprocessItem.job_id == job.id, ReprocessItem.position.in_(first))
        .returning(ReprocessItem.document_id)
    )
    return list(connection.scalars(taken))


def add_counts(connection: Connection, job: LockedJob, actions: Sequence[Action]) -> None:
    """Count what was done with documents of the job."""
    query = select(ReprocessJob.counts).where(ReprocessJob.id == job.id)
    counts = Counter(connection.scalar(query)) + Counter(str(action) for action in actions)
    _update(connection, job, counts=dict(counts), message=None)


def say(connection: Connection, job: LockedJob, message: str) -> None:
    """Store why the job waits."""
    _update(connection, job, message=message)


def finish(connection: Connection, job: LockedJob) -> None:
    """End the job: every document was handled."""
    _update(
        connection, job, state=ReprocessState.DONE, ended_at=func.clock_timestamp(), message=None
    )


def _update(connection: Connection, job: LockedJob, **values: Any) -> None:
    connection.execute(update(ReprocessJob).where(ReprocessJob.id == job.id).values(**values))


def cancel_job(job_id: str) -> bool:
    """Cancel the job; its runs stay. Return False if it had ended. Raises NotFound."""
    statement = (
        update(ReprocessJob)
        .where(ReprocessJob.id == job_id, ReprocessJob.state == ReprocessState.RUNNING)
        .values(state=ReprocessState.CANCELLED, ended_at=func.clock_timestamp(), message=None)
    )
    with begin() as connection:
        cancelled = connection.execute(statement).rowcount == 1
    get_job(job_id)
    return cancelled


def get_job(job_id: str) -> ReprocessJobView:
    """Return the job. Raises NotFound."""
    with reading() as connection:
        row = connection.execute(_views().where(ReprocessJob.id == job_id)).one_or_none()
    if row is None:
        raise NotFound(f"No reprocess job {job_id}.")
    return _view(row)


def list_jobs(limit: int, *, only_running: bool = False) -> list[ReprocessJobView]:
    """Return the newest jobs, the newest first."""
    query = _views().order_by(ReprocessJob.created_at.desc(), ReprocessJob.id.desc()).limit(limit)
    if only_running:
        query = query.where(ReprocessJob.state == ReprocessState.RUNNING)
    with reading() as connection:
        return [_view(row) for row in connection.execute(query)]


def _views() -> Select[Any]:
    active = sorted(set(RunState) - TERMINAL)
    ended_badly = [RunState.CANCELLED, RunState.FAILED]
    return select(
        ReprocessJob.__table__,
        _runs_in(active).label("runs_active"),
        _runs_in(ended_badly).label("runs_failed"),
    )


def _runs_in(states: Sequence[RunState]) -> Any:
    own = (Run.reprocess_job_id == ReprocessJob.id, Run.state.in_(states))
    return select(func.count()).where(*own).correlate(ReprocessJob).scalar_subquery()


def _view(row: Row[Any]) -> ReprocessJobView:
    return ReprocessJobView(
        id=row.id,
        state=ReprocessState(row.state),
        priority="bulk" if row.priority == Priority.BULK else "interactive",
        total=row.total,
        handled=sum(row.counts.values()),
        counts=row.counts,
        runs_active=row.runs_active,
        runs_failed=row.runs_failed,
        message=row.message,
        created_at=row.created_at,
        ended_at=row.ended_at,
    )


def remove_ended() -> None:
    """Remove some documents of cancelled jobs, and jobs that ended long ago."""
    is_running = ReprocessJob.state == ReprocessState.RUNNING
    left = (
        select(ReprocessItem.job_id, ReprocessItem.position)
        .join(ReprocessJob, ReprocessJob.id == ReprocessItem.job_id)
        .where(~is_running)
        .limit(_REMOVED_AT_ONCE)
        .subquery()
    )
    age = func.make_interval(0, 0, 0, _KEPT_DAYS)
    with begin() as connection:
        connection.execute(
            delete(ReprocessItem).where(
                ReprocessItem.job_id == left.c.job_id, ReprocessItem.position == left.c.position
            )
        )
        connection.execute(
            delete(ReprocessJob).where(ReprocessJob.ended_at < func.clock_timestamp() - age)
        )
