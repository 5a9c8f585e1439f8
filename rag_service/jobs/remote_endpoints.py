"""The state of an endpoint as its live jobs show it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import and_, func, select

from rag_service.database.engine import begin
from rag_service.database.models import RemoteJob
from rag_service.states import JobState, PostReason

_QUEUED = "IN_QUEUE"


@dataclass(frozen=True, slots=True)
class LiveJobs:
    """The number of an endpoint's live jobs; whether one has been queued for long; whether the
    last poll of at least one was answered; the message of a last poll that failed.

    `lost`: posts whose answer was lost; `lost_again`: those of them that repeated a lost one;
    `lost_message`: what one of them got in place of an answer.
    """

    number: int
    queued_for_long: bool
    answered: bool
    poll_error: str | None
    lost: int
    lost_again: int
    lost_message: str | None


def live_jobs(base_url: str, endpoint_id: str, *, long: float) -> LiveJobs:
    """Return the state of the endpoint's live jobs; `long` in seconds since the post."""
    old = RemoteJob.submitted_at < func.clock_timestamp() - timedelta(seconds=long)
    queued = and_(RemoteJob.last_status == _QUEUED, old)
    answered = and_(RemoteJob.last_status.is_not(None), RemoteJob.error_message.is_(None))
    is_live, is_lost = RemoteJob.state == JobState.LIVE, RemoteJob.state == JobState.LOST
    again = RemoteJob.reason == PostReason.LOST_ANSWER
    query = select(
        func.count().filter(is_live),
        func.coalesce(func.bool_or(queued).filter(is_live), False),
        func.coalesce(func.bool_or(answered).filter(is_live), False),
        func.max(RemoteJob.error_message).filter(is_live),
        func.count().filter(is_lost),
        func.count().filter(is_lost, again),
        func.max(RemoteJob.error_message).filter(is_lost),
    ).where(
        RemoteJob.base_url == base_url,
        RemoteJob.endpoint_id == endpoint_id,
        RemoteJob.state.in_([JobState.LIVE, JobState.LOST]),
    )
    with begin() as connection:
        return LiveJobs(*connection.execute(query).one())
