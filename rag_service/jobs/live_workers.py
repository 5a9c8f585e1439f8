"""Live workers, the wake-up messages they need, and the maintenance lease."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import and_, delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.sql import ColumnElement

from rag_service.database.engine import begin, reading
from rag_service.database.models import MaintenanceLease, Run, WorkerRow
from rag_service.database.storable_text import clean
from rag_service.jobs.claim_conditions import claimable
from rag_service.states import HELD, Priority, Stage

# A worker without a heartbeat for this long (three heartbeats) is not sent messages.
ALIVE_SECONDS = 30.0
HEARTBEAT_SECONDS = 10.0
_STALE_AFTER = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class LiveWorker:
    """A live worker: its number of forks, of forks that hold a run, and that hold a bulk run.

    `low_memory`: it claims nothing until its machine has enough memory available. `fork_deaths`:
    forks that ended in a row without a result; `trouble` says why once they are several.
    """

    id: str
    stage: Stage
    forks: int
    busy: int
    bulk: int
    low_memory: bool = False
    fork_deaths: int = 0
    trouble: str | None = None

    @property
    def free(self) -> int:
        return 0 if self.low_memory else max(0, self.forks - self.busy)

    @property
    def free_for_bulk(self) -> int:
        return max(0, min(self.free, max(1, self.forks - 1) - self.bulk))


def heartbeat(
    worker: str,
    stage: Stage,
    forks: int,
    *,
    low_memory: bool = False,
    fork_deaths: int = 0,
    trouble: str | None = None,
) -> None:
    """Store that the worker's main process is alive, and its number of forks."""
    values = {
        "stage": stage,
        "forks": forks,
        "low_memory": low_memory,
        "fork_deaths": fork_deaths,
        "trouble": clean(trouble) if trouble else None,
        "seen_at": func.clock_timestamp(),
    }
    with begin() as connection:
        connection.execute(
            upsert(WorkerRow)
            .values(id=worker, **values)
            .on_conflict_do_update(index_elements=["id"], set_=values)
        )


def remove(worker: str) -> None:
    """Remove a worker that stops."""
    with begin() as connection:
        connection.execute(delete(WorkerRow).where(WorkerRow.id == worker))


def remove_stale() -> None:
    """Remove workers without a heartbeat for an hour."""
    with begin() as connection:
        stale = WorkerRow.seen_at < func.clock_timestamp() - _STALE_AFTER
        connection.execute(delete(WorkerRow).where(stale))


def of_stage(stage: Stage) -> list[LiveWorker]:
    """Return the live workers of a stage, by id."""
    held = and_(Run.lease_worker == WorkerRow.id, Run.state.in_(HELD))
    query = (
        select(
            WorkerRow.id,
            WorkerRow.forks,
            func.count(Run.id),
            func.count(Run.id).filter(Run.priority >= Priority.BULK),
            WorkerRow.low_memory,
            WorkerRow.fork_deaths,
            WorkerRow.trouble,
        )
        .outerjoin(Run, held)
        .where(WorkerRow.stage == stage, is_alive())
        .group_by(WorkerRow.id, WorkerRow.forks)
        .order_by(WorkerRow.id)
    )
    with reading() as connection:
        rows = connection.execute(query).all()
    return [LiveWorker(row[0], stage, *row[1:]) for row in rows]


def report_store_fault(worker: str, message: str | None) -> None:
    """Store why forks of the worker cannot reach the document store, or that they can.

    A report that is not renewed expires like a heartbeat.
    """
    with begin() as connection:
        connection.execute(
            update(WorkerRow)
            .where(WorkerRow.id == worker)
            .values(
                store_fault=clean(message) if message else None,
                store_fault_at=func.clock_timestamp() if message else None,
            )
        )


def has_store_fault() -> ColumnElement[bool]:
    """Return the condition that the worker's forks cannot reach the document store."""
    moment = func.clock_timestamp() - timedelta(seconds=ALIVE_SECONDS)
    return func.coalesce(WorkerRow.store_fault_at > moment, False)


def store_faults() -> list[tuple[str, str]]:
    """Return the live workers that cannot reach the document store, with their reasons."""
    query = (
        select(WorkerRow.id, WorkerRow.store_fault)
        .where(is_alive(), has_store_fault())
        .order_by(WorkerRow.id)
    )
    with begin() as connection:
        return [(worker, message or "") for worker, message in connection.execute(query)]


def is_alive() -> ColumnElement[bool]:
    """Return the condition that the worker sent a heartbeat within ALIVE_SECONDS."""
    return WorkerRow.seen_at > func.clock_timestamp() - timedelta(seconds=ALIVE_SECONDS)


def claimable_counts(stage: Stage, server: str | None, most: int) -> tuple[int, int]:
    """Return the numbers of runs that may be claimed now: (interactive, bulk).

    Only the first `most` runs in claim order are counted.
    """
    first = (
        select(Run.priority)
        .where(claimable(stage, server))
        .order_by(Run.priority, Run.queued_at, Run.id)
        .limit(most)
        .subquery()
    )
    interactive = func.count().filter(first.c.priority < Priority.BULK)
    with begin() as connection:
        query = select(interactive, func.count()).select_from(first)
        urgent, total = connection.execute(query).one()
    return urgent, total - urgent


def wake_ups_wanted(workers: list[LiveWorker], interactive: int, bulk: int) -> int:
    """Return the number of claimable runs that free forks may take: one message for each."""
    free = sum(worker.free for worker in workers)
    bulk_places = min(bulk, sum(worker.free_for_bulk for worker in workers))
    return min(free, interactive + bulk_places)


@dataclass(frozen=True, slots=True)
class MaintenanceClaim:
    """A process's claim on maintenance, fenced by its epoch."""

    holder: str
    epoch: int


def claim_maintenance(holder: str, seconds: float) -> MaintenanceClaim | None:
    """Take or renew the maintenance lease. Return None if another live process holds it."""
    expires = func.clock_timestamp() + timedelta(seconds=seconds)
    now = func.clock_timestamp()
    lease = MaintenanceLease
    is_own = lease.holder == holder
    statement = (
        upsert(lease)
        .values(id=1, holder=holder, epoch=1, expires_at=expires, seen_at=now)
        .on_conflict_do_update(
            index_elements=["id"],
            set_={
                "holder": holder,
                "epoch": lease.epoch + func.cast(lease.holder != holder, lease.epoch.type),
                "expires_at": expires,
                "seen_at": now,
            },
            where=or_(is_own, lease.expires_at < func.clock_timestamp()),
        )
        .returning(lease.epoch)
    )
    with begin() as connection:
        epoch = connection.scalar(statement)
    return MaintenanceClaim(holder, epoch) if epoch is not None else None


def release_maintenance(claim: MaintenanceClaim) -> None:
    """Release the lease at once, so that another process need not wait until it expires."""
    with begin() as connection:
        connection.execute(
            update(MaintenanceLease)
            .where(MaintenanceLease.holder == claim.holder, MaintenanceLease.epoch == claim.epoch)
            .values(expires_at=func.clock_timestamp())
        )


def maintenance_silence() -> float | None:
    """Return the seconds since maintenance last began a round, or None if it never ran."""
    silence = func.extract("epoch", func.clock_timestamp() - MaintenanceLease.seen_at)
    with begin() as connection:
        seconds = connection.scalar(select(silence))
    return None if seconds is None else float(seconds)
