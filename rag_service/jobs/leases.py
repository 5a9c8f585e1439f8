"""Leases on runs: claim, renew, release, crash and expiry.

All times are the database's. Every claim raises the run's epoch; a write with an older epoch
changes nothing and raises LeaseLost.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Row, bindparam, case, func, literal_column, select, update
from sqlalchemy.sql import ColumnElement
from sqlalchemy.sql.dml import ReturningUpdate

from rag_service.config.options import LeaseOptions
from rag_service.database.engine import autocommit, begin
from rag_service.database.models import Document, Page, Run
from rag_service.errors import LeaseLost, WorkerCrashed
from rag_service.jobs.claim_conditions import best_claimable, claimable, follows_jobs, held_by
from rag_service.jobs.endings import UNCLAIMED, WORKED, end_run
from rag_service.runtime.time_spent import TimeSpent
from rag_service.states import HELD, LayoutMode, PageState, RunState, Stage

# The state in which a released run waits for its next worker.
_RELEASED_STATE = case(
    (Run.state == RunState.PREPARING, RunState.QUEUED.value),
    (Run.state == RunState.OCR, RunState.READY.value),
    (Run.ready_at.is_(None), RunState.QUEUED.value),
    else_=RunState.READY.value,
)

# Seconds of later arrivals that go before a run that gave way, for each second of work on it, and
# the most of them.
_BEHIND_PER_SECOND, _LONGEST_BEHIND = 10.0, 3600.0
# The longest pause of a run between two processes that were in trouble.
_LONGEST_PAUSE = 300.0


class Blame(StrEnum):
    """What the end of a process is counted as for the run that it held."""

    # The run may be the cause: a few of these fail it.
    CRASH = "crash"
    # Its process lacked resources, or others died too: counted like an expired lease.
    TROUBLE = "trouble"
    # Its process cannot work at all.
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Claimant:
    """A fork that asks for a run, and the number of forks of its worker."""

    worker: str
    task: str
    forks: int

    @property
    def bulk_limit(self) -> int:
        """Forks that may hold bulk runs: one of several is reserved for interactive runs."""
        return max(1, self.forks - 1)


@dataclass(frozen=True, slots=True)
class ClaimedRun:
    """A run that a fork holds, and its document's data and options."""

    id: str
    epoch: int
    document_id: str
    filename: str
    media_type: str
    source_key: str
    parser: str
    model: str
    ocr: str
    dpi: int
    layout: LayoutMode
    fingerprint: str
    reuse_pages: bool
    redo_pages: tuple[int, ...]
    page_count: int | None
    worked_seconds: float
    spent: TimeSpent


def claim(
    stage: Stage, claimant: Claimant, lease: LeaseOptions, *, server: str | None
) -> ClaimedRun | None:
    """Claim the first run in order that this fork may have. Return None if there is none.

    `server` is the OCR server that the fork would use: during its outage only the run chosen to
    try it may be claimed.
    """
    with begin() as connection:
        # Two forks of one worker must not both take the last bulk place. A separate statement:
        # the next one must see what the lock's last holder committed.
        connection.execute(select(func.pg_advisory_xact_lock(_lock_key(claimant.worker))))
        statement = _claim_statement(
            stage, claimant.worker, claimant.bulk_limit, lease.seconds, server
        )
        row = connection.execute(statement, {"task": claimant.task}).one_or_none()
        return _claimed_run(row) if row else None


def _lock_key(worker: str) -> ColumnElement[int]:
    return func.hashtextextended("claim:" + worker, 0)


@lru_cache
def _claim_statement(
    stage: Stage, worker: str, bulk_limit: int, seconds: float, server: str | None
) -> ReturningUpdate[*tuple[Any, ...]]:
    """Return the statement for a claim. Cached, because only `task` changes between claims."""
    best = best_claimable(stage, worker, bulk_limit, server)
    return (
        update(Run)
        .where(Run.id == best, Document.id == Run.document_id)
        .values(
            state=stage.working,
            epoch=Run.epoch + 1,
            retry_at=None,
            lease_worker=worker,
            lease_task=bindparam("task"),
            lease_expires_at=_from_now(seconds),
            held_since=func.clock_timestamp(),
            started_at=func.coalesce(Run.started_at, func.now()),
        )
        .returning(Run, Document.filename, Document.media_type, Document.source_key)
    )


def _claimed_run(row: Row[*tuple[Any, ...]]) -> ClaimedRun:
    return ClaimedRun(
        id=row.id,
        epoch=row.epoch,
        document_id=row.document_id,
        filename=row.filename,
        media_type=row.media_type,
        source_key=row.source_key,
        parser=row.parser,
        model=row.model,
        ocr=row.ocr,
        dpi=row.dpi,
        layout=LayoutMode(row.layout),
        fingerprint=row.fingerprint,
        reuse_pages=row.reuse_pages,
        redo_pages=tuple(row.redo_pages),
        page_count=row.page_count,
        worked_seconds=row.worked_seconds,
        spent=TimeSpent(row.page_seconds, row.late_pages, row.late_texts),
    )


def _from_now(seconds: float) -> ColumnElement[object]:
    return func.clock_timestamp() + timedelta(seconds=seconds)


def renew(run: ClaimedRun, lease: LeaseOptions) -> bool:
    """Extend the lease. Return False if it was lost or has expired.

    A process that was frozen past its lease must not resume the run.
    """
    is_unexpired = is_held_under(run) & (Run.lease_expires_at > func.clock_timestamp())
    with begin() as connection:
        renewed = connection.execute(
            update(Run).where(is_unexpired).values(lease_expires_at=_from_now(lease.seconds))
        )
        return renewed.rowcount == 1


def is_held_under(run: ClaimedRun) -> ColumnElement[bool]:
    """Return the condition that fences a write: the run is held under this claim's epoch."""
    return (Run.id == run.id) & (Run.epoch == run.epoch) & Run.state.in_(HELD)


def fence(connection: Connection, run: ClaimedRun, **values: object) -> None:
    """Write to the run's row under its lease, and lock the row until the transaction ends.

    Raises LeaseLost.
    """
    written = connection.execute(update(Run).where(is_held_under(run)).values(**values))
    if written.rowcount != 1:
        raise LeaseLost()


def release(run: ClaimedRun, *, retry_in: float | None = None) -> bool:
    """Release the run without counting a crash or an expiry.

    It may be claimed again after `retry_in` seconds. Return False if the lease was lost.
    """
    values: dict[str, object] = {"retry_at": _from_now(retry_in) if retry_in else None}
    with begin() as connection:
        return len(_release_runs(connection, is_held_under(run), values)) == 1


def is_at_work(task: str) -> bool:
    """Return whether a fork holds a run that it claimed for this Celery task."""
    held = select(Run.id).where(Run.state.in_(HELD), Run.lease_task == task).limit(1)
    with autocommit() as connection:
        return connection.scalar(held) is not None


def time_spent(spent: TimeSpent | None) -> dict[str, float]:
    """Return the values of a run's row for the time that its pages took."""
    if spent is None:
        return {}
    return {
        "page_seconds": spent.seconds,
        "late_pages": spent.late_pages,
        "late_texts": spent.late_texts,
    }


def others_wait(stage: Stage, run: ClaimedRun) -> bool:
    """Return whether a run that is no less urgent could use the fork that holds this one."""
    own = select(Run.priority).where(Run.id == run.id).correlate(None).scalar_subquery()
    waiting = select(Run.id).where(claimable(stage, None), Run.priority <= own).limit(1)
    with autocommit() as connection:
        return connection.scalar(waiting) is not None


def give_way(run: ClaimedRun) -> bool:
    """Release the run behind those that wait now or come soon. Nothing is charged to it.

    The longer it was worked on, the more come before it, up to those of an hour: so it is never
    overtaken for ever. Return False if the lease was lost.
    """
    behind = func.least(WORKED * _BEHIND_PER_SECOND, _LONGEST_BEHIND)
    values: dict[str, object] = {
        "queued_at": func.clock_timestamp() + behind * literal_column("interval '1 second'"),
        "retry_at": None,
    }
    with begin() as connection:
        return len(_release_runs(connection, is_held_under(run), values)) == 1


def release_worker(worker: str) -> int:
    """Release all runs of a worker that is shutting down. Return their number."""
    with begin() as connection:
        return len(_release_runs(connection, held_by(worker)))


def release_crashed(
    worker: str,
    task: str,
    lease: LeaseOptions,
    blame: Blame = Blame.CRASH,
    reason: str | None = None,
) -> str | None:
    """Release the run of a child that died or ends, and count it; at a limit the run fails.

    Return the run's id, or None if the child held none. After trouble the run waits before it is
    claimed again, each time twice as long.
    """
    held = held_by(worker) & (Run.lease_task == task)
    return next(iter(_release_counted(held, _COUNTED[blame], lease, reason=reason)), None)


_COUNTED: dict[Blame, dict[str, object]] = {
    Blame.CRASH: {"crashes": Run.crashes + 1},
    Blame.TROUBLE: {
        "expiries": Run.expiries + 1,
        "retry_at": func.clock_timestamp()
        + func.least(func.power(2.0, Run.expiries), _LONGEST_PAUSE)
        * literal_column("interval '1 second'"),
    },
    Blame.NONE: {},
}


def release_expired(lease: LeaseOptions) -> int:
    """Release runs whose lease was not renewed in time; at the limit they fail.

    Return their number. No lease expires within a lease's time of PostgreSQL's start, because no
    owner could renew before.
    """
    expired = (
        Run.state.in_(HELD)
        & (Run.lease_expires_at < func.clock_timestamp())
        & (func.pg_postmaster_start_time() < _from_now(-lease.seconds))
    )
    # SKIP LOCKED: an owner that is writing to its row now is alive.
    return len(_release_counted(expired, {"expiries": Run.expiries + 1}, lease, skip_locked=True))


def _release_counted(
    condition: ColumnElement[bool],
    values: dict[str, object],
    lease: LeaseOptions,
    *,
    skip_locked: bool = False,
    reason: str | None = None,
) -> list[str]:
    with begin() as connection:
        released = _release_runs(connection, condition, values, skip_locked=skip_locked)
        for row in released:
            if row.crashes >= lease.crash_limit or row.expiries >= lease.expiry_limit:
                _quarantine(connection, row, reason)
        return [row.id for row in released]


def _release_runs(
    connection: Connection,
    condition: ColumnElement[bool],
    values: dict[str, object] | None = None,
    *,
    skip_locked: bool = False,
) -> list[Row[*tuple[Any, ...]]]:
    """Release the runs with these values; one whose jobs have all its pages stays with its jobs.

    Such a run had no page in progress, so nothing is counted for it.
    """
    locked = select(Run.id).where(condition).with_for_update(skip_locked=skip_locked)
    run_ids = connection.scalars(locked).all()
    usual = {"state": _RELEASED_STATE, **(values or {})}
    following = {"state": RunState.REMOTE}
    is_following = follows_jobs(Run)
    return [
        row
        for chosen, changes in ((is_following, following), (~is_following, usual))
        for row in connection.execute(
            update(Run)
            .where(Run.id.in_(run_ids), Run.state.in_(HELD), chosen)
            .values(worked_seconds=WORKED, **UNCLAIMED, **changes)
            .returning(Run.id, Run.epoch, Run.crashes, Run.expiries)
        )
    ]


def _quarantine(connection: Connection, row: Row[*tuple[Any, ...]], reason: str | None) -> None:
    in_progress = select(Page.number).where(
        Page.run_id == row.id, Page.state == PageState.PENDING, Page.hand_epoch == row.epoch
    )
    pages = sorted(connection.scalars(in_progress))
    shown = f"pages in progress: {', '.join(map(str, pages))}" if pages else "no page in progress"
    lost = f"lost children: {row.crashes}, expired leases: {row.expiries}"
    last = f"; the last time: {reason}" if reason else ""
    error = WorkerCrashed(f"{WorkerCrashed().message} ({lost}; {shown}{last})")
    end_run(connection, row.id, RunState.FAILED, error)


def is_valid(run: ClaimedRun) -> bool:
    """Return whether the lease is still held under this claim."""
    with autocommit() as connection:
        return connection.scalar(select(Run.id).where(is_held_under(run))) is not None


def require_valid(run: ClaimedRun) -> None:
    """Raise LeaseLost if the lease is no longer held under this claim."""
    if not is_valid(run):
        raise LeaseLost()
