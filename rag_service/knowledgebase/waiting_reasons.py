"""The reason why a run waits, as an SQL expression."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy import and_, case, func, select
from sqlalchemy.sql import ColumnElement

from rag_service.config.loader import get_settings
from rag_service.database.models import OcrServer, Run, WorkerRow
from rag_service.jobs.claim_conditions import follows_jobs, server_is_out
from rag_service.jobs.live_workers import has_store_fault, is_alive
from rag_service.states import HELD, RunState, Stage, WaitingFor


def waiting_reason(run: type[Run], server: str | None) -> ColumnElement[str | None]:
    """Return why the run waits; null if it has ended or a live worker is at work on it.

    `server` is the OCR server in use: an outage of it is a reason to wait.
    """
    worker = select(WorkerRow.id).where(is_alive(), WorkerRow.stage == _stage(run)).correlate(run)
    reasons: list[tuple[ColumnElement[bool], Any]] = [
        (run.state == RunState.REMOTE, WaitingFor.REMOTE_JOB.value),
        (_is_abandoned(run), WaitingFor.WORKER.value),
        (follows_jobs(run), WaitingFor.REMOTE_JOB.value),
        (run.state.not_in([Stage.PREPARE.waiting, Stage.OCR.waiting]), None),
    ]
    if server:
        is_out = and_(run.state == Stage.OCR.waiting, server_is_out(server, run.id))
        reasons.append((is_out, WaitingFor.OCR_SERVER.value))
    # Without any live worker, that is the reason.
    reaches = worker.where(~has_store_fault())
    reasons += [
        (worker.exists() & ~reaches.exists(), WaitingFor.STORAGE.value),
        (run.retry_at > func.now(), WaitingFor.RETRY.value),
        (~worker.where(WorkerRow.trouble.is_(None)).exists(), WaitingFor.WORKER.value),
        (~worker.where(~WorkerRow.low_memory).exists(), WaitingFor.MEMORY_GUARD.value),
    ]
    return case(*reasons, else_=WaitingFor.QUEUE.value)


def server_message(server: str | None) -> ColumnElement[str | None]:
    """Return what was last found wrong with the OCR server; null if it was never asked."""
    return select(OcrServer.message).where(OcrServer.url == (server or "")).scalar_subquery()


def _is_abandoned(run: type[Run]) -> ColumnElement[bool]:
    """Return the condition that the owner has stopped by its own clock before the lease expired."""
    lease = get_settings().lease
    left = timedelta(seconds=lease.seconds - lease.give_up_after)
    return and_(run.state.in_(HELD), run.lease_expires_at < func.clock_timestamp() + left)


def _stage(run: type[Run]) -> ColumnElement[str]:
    return case((run.state == Stage.PREPARE.waiting, Stage.PREPARE.value), else_=Stage.OCR.value)
