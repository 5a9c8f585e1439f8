"""Which workers are alive, and who holds maintenance. Used by workers, maintenance and health."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection, and_, delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.sql import ColumnElement

from rag_service.database.engine import begin
from rag_service.database.models import MaintenanceLease, Run, WorkerRow
from rag_service.jobs.leases import claimable
from rag_service.states import HELD, Priority, Stage

# A worker that was not seen for this long takes no doorbells; it beats three times in it.
ALIVE_SECONDS = 30.0
HEARTBEAT_SECONDS = 10.0
_FORGET_AFTER = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A live worker: its forks, those that hold a run, and those of them that hold a bulk run.

    `low_memory`: it claims nothing until its machine has memory again.
    """

    id: str
    stage: Stage
    forks: int
    busy: int
    bulk: int
    low_memory: bool = False

    @property
    def free(self) -> int:
        return 0 if self.low_memory else max(0, self.forks - self.busy)

    @property
    def free_for_bulk(self) -> int:
        return max(0, min(self.free, max(1, self.forks - 1) - self.bulk))


def heartbeat(worker: str, stage: Stage, forks: int, *, low_memory: bool = False) -> None:
    """The worker's main process is alive and has that many forks."""
    values = {
        "stage": stage,
        "forks": forks,
        "low_memory": low_memory,
        "seen_at": func.clock_timestamp(),
    }
    with begin() as connection:
        connection.execute(
            upsert(WorkerRow)
            .values(id=worker, **values)
            .on_conflict_do_update(index_elements=["id"], set_=values)
        )


def leave(worker: str) -> None:
    """The worker stops."""
    with begin() as connection:
        connection.execute(delete(WorkerRow).where(WorkerRow.id == worker))


def forget_dead() -> None:
    """Drop the rows of workers that have been gone for long."""
    with begin() as connection:
        gone = WorkerRow.seen_at < func.clock_timestamp() - _FORGET_AFTER
        connection.execute(delete(WorkerRow).where(gone))


def loads(stage: Stage) -> list[WorkerLoad]:
    """The live workers of a stage."""
    held = and_(Run.lease_worker == WorkerRow.id, Run.state.in_(HELD))
    query = (
        select(
            WorkerRow.id,
            WorkerRow.forks,
            func.count(Run.id),
            func.count(Run.id).filter(Run.priority >= Priority.BULK),
            WorkerRow.low_memory,
        )
        .outerjoin(Run, held)
        .where(WorkerRow.stage == stage, alive())
        .group_by(WorkerRow.id, WorkerRow.forks)
        .order_by(WorkerRow.id)
    )
    with begin() as connection:
        return [WorkerLoad(i, stage, f, b, k, low) for i, f, b, k, low in connection.execute(query)]


def alive() -> ColumnElement[bool]:
    """The condition that a worker was seen lately."""
    return WorkerRow.seen_at > func.clock_timestamp() - timedelta(seconds=ALIVE_SECONDS)


def claimable_counts(stage: Stage, server: str | None) -> tuple[int, int]:
    """Runs that may be claimed now: (interactive, bulk)."""
    interactive = func.count().filter(Run.priority < Priority.BULK)
    query = select(interactive, func.count()).select_from(Run).where(claimable(stage, server))
    with begin() as connection:
        urgent, total = connection.execute(query).one()
    return urgent, total - urgent


def wake_ups_wanted(workers: list[WorkerLoad], interactive: int, bulk: int) -> int:
    """Doorbells that make every claimable run that a free fork may take be taken, and no more."""
    free = sum(worker.free for worker in workers)
    bulk_places = min(bulk, sum(worker.free_for_bulk for worker in workers))
    return min(free, interactive + bulk_places)


@dataclass(frozen=True, slots=True)
class MaintenanceHold:
    """The right to run maintenance, fenced by its epoch."""

    holder: str
    epoch: int


def hold_maintenance(holder: str, seconds: float) -> MaintenanceHold | None:
    """Take or renew the maintenance lease; None while another live process holds it."""
    expires = func.clock_timestamp() + timedelta(seconds=seconds)
    now = func.clock_timestamp()
    lease = MaintenanceLease
    mine = lease.holder == holder
    taken = (
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
            where=or_(mine, lease.expires_at < func.clock_timestamp()),
        )
        .returning(lease.epoch)
    )
    with begin() as connection:
        epoch = connection.scalar(taken)
    return MaintenanceHold(holder, epoch) if epoch is not None else None


def leave_maintenance(tenure: MaintenanceHold) -> None:
    """Give the lease up at once, so that another process need not wait for it."""
    with begin() as connection:
        connection.execute(
            update(MaintenanceLease)
            .where(MaintenanceLease.holder == tenure.holder, MaintenanceLease.epoch == tenure.epoch)
            .values(expires_at=func.clock_timestamp())
        )


def maintenance_seen(connection: Connection) -> datetime | None:
    """When maintenance last began a round, or None where it never ran."""
    return connection.scalar(select(MaintenanceLease.seen_at))
