"""Queries of the remote jobs of a document."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session
from sqlalchemy.sql.functions import coalesce

from rag_service.database.engine import reading
from rag_service.database.models import RemoteJob, Run
from rag_service.knowledgebase.views import JobView
from rag_service.states import JobOutcome, JobState, PostReason


def list_jobs(document_id: str) -> list[JobView]:
    """Return the posts of all runs of a document, oldest first."""
    until = coalesce(RemoteJob.ended_at, func.clock_timestamp())
    age = func.extract("epoch", until - RemoteJob.submitted_at)
    query = (
        select(RemoteJob, age)
        .join(Run, Run.id == RemoteJob.run_id)
        .where(Run.document_id == document_id)
        .order_by(RemoteJob.submitted_at, RemoteJob.id)
    )
    with reading() as connection, Session(connection) as session:
        return [_view(job, float(seconds)) for job, seconds in session.execute(query)]


def _view(job: RemoteJob, age: float) -> JobView:
    ran = None if job.execution_ms is None else job.execution_ms / 1000
    return JobView(
        remote_id=job.remote_id,
        run_id=job.run_id,
        endpoint_id=job.endpoint_id,
        pages=job.pages,
        reason=PostReason(job.reason),
        state=JobState(job.state),
        last_status=job.last_status,
        outcome=None if job.outcome is None else JobOutcome(job.outcome),
        submitted_at=job.submitted_at,
        expires_at=job.expires_at,
        age_seconds=round(age, 3),
        polls=job.polls,
        delay_ms=job.delay_ms,
        execution_ms=job.execution_ms,
        usd=None if ran is None else round(ran * job.usd_per_second, 6),
        error=job.error_message,
    )
