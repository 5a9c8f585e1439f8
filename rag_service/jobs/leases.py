"""Who works on which run: claim, renew, release, crash and expiry. Used by workers and maintenance.

All times are the database's. Every claim raises the run's epoch; a write that carries an older
epoch changes nothing and raises LeaseLost.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    Connection,
    Row,
    ScalarSelect,
    Select,
    bindparam,
    case,
    func,
    literal,
    or_,
    select,
    update,
)
from sqlalchemy.orm import InstrumentedAttribute
from sqlalchemy.sql import ColumnElement
from sqlalchemy.sql.dml import ReturningUpdate

from rag_service.config.options import LeaseOptions
from rag_service.database.engine import begin, single
from rag_service.database.models import Document, OcrServer, Page, Run
from rag_service.errors import LeaseLost, WorkerCrashed
from rag_service.jobs.endings import UNCLAIMED, WORKED, end_run
from rag_service.states import HELD, LayoutMode, PageState, Priority, RunState, ServerState, Stage

# Where a run that is let go waits for its next worker.
_WAITING_AGAIN = case(
    (Run.state == RunState.PREPARING, RunState.QUEUED.value),
    (Run.state == RunState.OCR, RunState.READY.value),
    (Run.ready_at.is_(None), RunState.QUEUED.value),
    else_=RunState.READY.value,
)


@dataclass(frozen=True, slots=True)
class Claimant:
    """A fork that asks for work, and how many forks its worker has."""

    worker: str
    task: str
    forks: int

    @property
    def bulk_limit(self) -> int:
        """Forks that bulk runs may hold: one of several is kept for interactive ones."""
        return max(1, self.forks - 1)


@dataclass(frozen=True, slots=True)
class ClaimedRun:
    """A run that a fork holds, with what it needs to work on it."""

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


def claim(
    stage: Stage, claimant: Claimant, lease: LeaseOptions, *, server: str | None
) -> ClaimedRun | None:
    """The best run of the stage that this fork may have, or None.

    `server` is the OCR server the fork would use: while it is out, only the run chosen to try
    it may be claimed.
    """
    with begin() as connection:
        # Two forks of one worker must not both take the last bulk place. A statement of its own:
        # the next one must see what the lock's last holder did.
        connection.execute(select(func.pg_advisory_xact_lock(_lock_key(claimant.worker))))
        taking = _taking(stage, claimant.worker, claimant.bulk_limit, lease.seconds, server)
        taken = connection.execute(taking, {"task": claimant.task}).one_or_none()
        return _claimed(taken) if taken else None


def _best(stage: Stage, worker: str, bulk_limit: int, server: str | None) -> ScalarSelect[str]:
    """The query for the run to claim; it locks the run."""
    return (
        select(Run.id)
        .where(claimable(stage, server), ~_is_at_work(worker))
        .where(Run.priority < _priority_limit(worker, bulk_limit))
        .order_by(Run.priority, Run.created_at, Run.id)
        .limit(1)
        .with_for_update(skip_locked=True)
        .correlate(None)
        .scalar_subquery()
    )


def _is_at_work(worker: str) -> ColumnElement[bool]:
    """Whether the broker delivered this very message again while a fork still works on it."""
    held = _held_by(worker) & (Run.lease_task == bindparam("task"))
    return select(Run.id).where(held).correlate(None).exists()


def _priority_limit(worker: str, bulk_limit: int) -> ColumnElement[int]:
    """A fork may have runs below it: an expression, which an index can be searched by."""
    held = _bulk_held(worker).correlate(None).scalar_subquery()
    return case((held >= bulk_limit, Priority.BULK), else_=max(Priority) + 1)


def claimable(stage: Stage, server: str | None) -> ColumnElement[bool]:
    """The condition under which a run may be claimed for the stage now."""
    condition = _waits_at(stage) & is_due()
    if stage is Stage.OCR and server is not None:
        condition &= ~server_is_out(server, Run.id)
    return condition


def _waits_at(stage: Stage) -> ColumnElement[bool]:
    # In the SQL's own text, so that a prepared plan may use the partial index too.
    return Run.state == literal(stage.waiting.value, literal_execute=True)


def is_due() -> ColumnElement[bool]:
    """The condition that a run need not wait for a time to come."""
    return or_(Run.retry_at.is_(None), Run.retry_at <= func.now())


def server_is_out(server: str, run_id: InstrumentedAttribute[str]) -> ColumnElement[bool]:
    """Whether an outage of the OCR server keeps this run waiting.

    Looked up once a query, not joined: a join would have every waiting run read and sorted.
    """
    trying = select(OcrServer.trial_run_id).where(
        OcrServer.url == server, OcrServer.state != ServerState.UP
    )
    return trying.exists() & trying.scalar_subquery().is_distinct_from(run_id)


def _bulk_held(worker: str) -> Select[int]:
    """The query for how many bulk runs a worker's forks hold now."""
    return select(func.count()).where(
        Run.lease_worker == worker, Run.state.in_(HELD), Run.priority >= Priority.BULK
    )


def _lock_key(worker: str) -> ColumnElement[int]:
    return func.hashtextextended("claim:" + worker, 0)


@lru_cache
def _taking(
    stage: Stage, worker: str, bulk_limit: int, seconds: float, server: str | None
) -> ReturningUpdate[*tuple[Any, ...]]:
    """Built once a fork, for a document's time counts: only the `task` changes."""
    best = _best(stage, worker, bulk_limit, server)
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


def _claimed(row: Row[*tuple[Any, ...]]) -> ClaimedRun:
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
    )


def _from_now(seconds: float) -> ColumnElement[object]:
    return func.clock_timestamp() + timedelta(seconds=seconds)


def renew(run: ClaimedRun, lease: LeaseOptions) -> bool:
    """Extend the claim; False where it is ours no longer, or its time is over.

    A process that was frozen for long must not hold on to a run that it has given up.
    """
    alive = ours(run) & (Run.lease_expires_at > func.clock_timestamp())
    with begin() as connection:
        renewed = connection.execute(
            update(Run).where(alive).values(lease_expires_at=_from_now(lease.seconds))
        )
        return renewed.rowcount == 1


def ours(run: ClaimedRun) -> ColumnElement[bool]:
    """The condition that fences a write: the run is held under this very claim."""
    return (Run.id == run.id) & (Run.epoch == run.epoch) & Run.state.in_(HELD)


def fence(connection: Connection, run: ClaimedRun, **values: object) -> None:
    """Write to the run's row under its claim, and hold the row until the transaction ends.

    Raises LeaseLost where the claim is gone.
    """
    written = connection.execute(update(Run).where(ours(run)).values(**values))
    if written.rowcount != 1:
        raise LeaseLost()


def release(run: ClaimedRun, *, retry_in: float | None = None) -> bool:
    """Give the run back without blame; it may be claimed again after `retry_in` seconds."""
    values: dict[str, object] = {"retry_at": _from_now(retry_in) if retry_in else None}
    with begin() as connection:
        return len(_let_go(connection, ours(run), values)) == 1


def release_worker(worker: str) -> int:
    """Give back everything that a worker which is shutting down still holds, without blame."""
    with begin() as connection:
        return len(_let_go(connection, _held_by(worker)))


def release_crashed(worker: str, task: str, lease: LeaseOptions) -> bool:
    """Give back the run of a lost child and count the crash; at the limit the run fails."""
    held = _held_by(worker) & (Run.lease_task == task)
    return _release_counted(held, {"crashes": Run.crashes + 1}, lease) > 0


def release_expired(lease: LeaseOptions) -> int:
    """Give back runs whose owner was not heard from in time; at the limit they fail.

    Nothing expires within a lease's time of PostgreSQL's own start: nobody could renew before.
    """
    expired = (
        Run.state.in_(HELD)
        & (Run.lease_expires_at < func.clock_timestamp())
        & (func.pg_postmaster_start_time() < _from_now(-lease.seconds))
    )
    # SKIP LOCKED: a row that its owner is writing to at this moment is alive.
    return _release_counted(expired, {"expiries": Run.expiries + 1}, lease, skip_locked=True)


def _held_by(worker: str) -> ColumnElement[bool]:
    return (Run.lease_worker == worker) & Run.state.in_(HELD)


def _release_counted(
    condition: ColumnElement[bool],
    values: dict[str, object],
    lease: LeaseOptions,
    *,
    skip_locked: bool = False,
) -> int:
    with begin() as connection:
        released = _let_go(connection, condition, values, skip_locked=skip_locked)
        for row in released:
            if row.crashes >= lease.crash_limit or row.expiries >= lease.expiry_limit:
                _quarantine(connection, row)
        return len(released)


def _let_go(
    connection: Connection,
    condition: ColumnElement[bool],
    values: dict[str, object] | None = None,
    *,
    skip_locked: bool = False,
) -> list[Row[*tuple[Any, ...]]]:
    locked = select(Run.id).where(condition).with_for_update(skip_locked=skip_locked)
    run_ids = connection.scalars(locked).all()
    released = (
        update(Run)
        .where(Run.id.in_(run_ids))
        .values(state=_WAITING_AGAIN, worked_seconds=WORKED, **UNCLAIMED, **(values or {}))
        .returning(Run.id, Run.epoch, Run.crashes, Run.expiries)
    )
    return list(connection.execute(released).all())


def _quarantine(connection: Connection, row: Row[*tuple[Any, ...]]) -> None:
    in_hand = select(Page.number).where(
        Page.run_id == row.id, Page.state == PageState.PENDING, Page.hand_epoch == row.epoch
    )
    pages = sorted(connection.scalars(in_hand))
    where = f"pages in hand: {', '.join(map(str, pages))}" if pages else "no page was in hand"
    lost = f"lost children: {row.crashes}, expired leases: {row.expiries}"
    error = WorkerCrashed(f"{WorkerCrashed().message} ({lost}; {where})")
    end_run(connection, row.id, RunState.FAILED, error)


def holds(run: ClaimedRun) -> bool:
    """Whether the claim still stands."""
    with single() as connection:
        return connection.scalar(select(Run.id).where(ours(run))) is not None


def require(run: ClaimedRun) -> None:
    """Raise LeaseLost where the claim does not stand any more."""
    if not holds(run):
        raise LeaseLost()
