"""The state of an endpoint as its live jobs show it."""

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
    """The number of an endpoint's live jobs; whether one has been queued for long; whether the
    last poll of at least one was answered; the message of a last poll that failed.
    """

    number: int
    queued_for_long: bool
    answered: bool
    poll_error: str | None


def live_jobs(base_url: str, endpoint_id: str, *, long: float) -> LiveJobs:
    """Return the state of the endpoint's live jobs; `long` in seconds since the post."""
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
