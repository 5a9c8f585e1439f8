"""What an endpoint's live jobs say of it together. Used by maintenance, which watches it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import and_, func, select

from rag_service.database.engine import begin
from rag_service.database.models import RemoteJob
from rag_service.states import JobState

_QUEUED = "IN_QUEUE"


@dataclass(frozen=True, slots=True)
class LiveJobs:
    """Of the endpoint's live jobs: how many there are, whether one has queued for long, whether
    the last poll of any was answered, and what a last poll that failed said.
    """

    number: int
    queued_for_long: bool
    answered: bool
    poll_error: str | None


def live_jobs(base_url: str, endpoint_id: str, *, long: float) -> LiveJobs:
    """The endpoint's live jobs; `long` in seconds since the post."""
    old = RemoteJob.submitted_at < func.clock_timestamp() - timedelta(seconds=long)
    queued = and_(RemoteJob.last_status == _QUEUED, old)
    answered = and_(RemoteJob.last_status.is_not(None), RemoteJob.error_message.is_(None))
    query = select(
        func.count(),
        func.coalesce(func.bool_or(queued), False),
        func.coalesce(func.bool_or(answered), False),
        func.max(RemoteJob.error_message),
    ).where(
        RemoteJob.base_url == base_url,
        RemoteJob.endpoint_id == endpoint_id,
        RemoteJob.state == JobState.LIVE,
    )
    with begin() as connection:
        return LiveJobs(*connection.execute(query).one())
