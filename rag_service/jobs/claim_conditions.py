"""SQL conditions that decide which run a fork may claim."""

from __future__ import annotations

from sqlalchemy import ScalarSelect, Select, and_, bindparam, case, func, literal, or_, select
from sqlalchemy.orm import InstrumentedAttribute
from sqlalchemy.sql import ColumnElement

from rag_service.database.models import OcrServer, Page, RemoteJob, Run
from rag_service.states import HELD, JobState, PageState, Priority, RunState, ServerState, Stage


def claimable(stage: Stage, server: str | None) -> ColumnElement[bool]:
    """Return the condition that a run may be claimed for the stage now."""
    condition = _waits_at(stage) & is_due()
    if stage is Stage.OCR and server is not None:
        condition &= ~server_is_out(server, Run.id)
    return condition


def _waits_at(stage: Stage) -> ColumnElement[bool]:
    # A literal in the SQL text, so that a prepared plan may use the partial index too.
    return Run.state == literal(stage.waiting.value, literal_execute=True)


def is_due() -> ColumnElement[bool]:
    """Return the condition that the run's `retry_at` is unset or has passed."""
    return or_(Run.retry_at.is_(None), Run.retry_at <= func.now())


def server_is_out(server: str, run_id: InstrumentedAttribute[str]) -> ColumnElement[bool]:
    """Return the condition that an outage of the OCR server keeps this run waiting.

    A scalar subquery, evaluated once per query: a join would read and sort every waiting run.
    """
    trying = select(OcrServer.trial_run_id).where(
        OcrServer.url == server, OcrServer.state != ServerState.UP
    )
    return trying.exists() & trying.scalar_subquery().is_distinct_from(run_id)


def follows_jobs(run: type[Run]) -> ColumnElement[bool]:
    """Return the condition that remote jobs have all remaining pages of a run at the OCR stage.

    Without EXISTS, for which a listing would read the whole table of pages.
    """
    remaining = (
        select(Page.number)
        .where(Page.run_id == run.id, Page.state == PageState.PENDING)
        .correlate(run)
        .limit(1)
    )
    submitting = (
        select(RemoteJob.id)
        .where(RemoteJob.run_id == run.id, RemoteJob.state == JobState.SUBMITTING)
        .correlate(run)
        .limit(1)
    )
    return and_(
        run.state == RunState.OCR,
        remaining.scalar_subquery().is_not(None),
        remaining.where(Page.remote_job_id.is_(None)).scalar_subquery().is_(None),
        submitting.scalar_subquery().is_(None),
    )


def held_by(worker: str) -> ColumnElement[bool]:
    """Return the condition that a fork of the worker holds the run."""
    return (Run.lease_worker == worker) & Run.state.in_(HELD)


def best_claimable(
    stage: Stage, worker: str, bulk_limit: int, server: str | None
) -> ScalarSelect[str]:
    """Return the query for the run that a fork of the worker may claim; it locks the run."""
    return (
        select(Run.id)
        .where(claimable(stage, server), ~_task_holds_a_run(worker))
        .where(Run.priority < _priority_limit(worker, bulk_limit))
        .order_by(Run.priority, Run.queued_at, Run.id)
        .limit(1)
        .with_for_update(skip_locked=True)
        .correlate(None)
        .scalar_subquery()
    )


def _task_holds_a_run(worker: str) -> ColumnElement[bool]:
    """Return the condition that the broker delivered a message a second time during its work."""
    held = held_by(worker) & (Run.lease_task == bindparam("task"))
    return select(Run.id).where(held).correlate(None).exists()


def _priority_limit(worker: str, bulk_limit: int) -> ColumnElement[int]:
    """Return the bound below which a run's priority must be; an index can be searched by it."""
    held = _bulk_count(worker).correlate(None).scalar_subquery()
    return case((held >= bulk_limit, Priority.BULK), else_=max(Priority) + 1)


def _bulk_count(worker: str) -> Select[int]:
    """Return the query for the number of bulk runs that the worker's forks hold."""
    return select(func.count()).where(held_by(worker), Run.priority >= Priority.BULK)
