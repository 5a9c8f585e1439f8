"""Rows of posts to other services: committed before the post, completed by its answer.

One live job a page: `pages.remote_job_id` is the claim. It is taken together with the post's row
and given back when the job ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Row, and_, func, insert, or_, select, update
from sqlalchemy.sql import ColumnElement

from rag_service.database.engine import begin
from rag_service.database.models import Page, RemoteJob, Run, new_id
from rag_service.database.storable_text import clean
from rag_service.errors import LeaseLost
from rag_service.jobs.leases import ClaimedRun, fence
from rag_service.jobs.remote_jobs import JobEnd, end_job
from rag_service.states import (
    HELD,
    TERMINAL,
    JobOutcome,
    JobState,
    PageState,
    PostReason,
    RunState,
)


@dataclass(frozen=True, slots=True)
class NewJob:
    """A post about to be made. `ttl` in seconds; the price is stored with the job."""

    base_url: str
    endpoint_id: str
    request_key: str
    token_sha256: str
    pages: tuple[int, ...]
    reason: PostReason
    ttl: float
    usd_per_second: float


@dataclass(frozen=True, slots=True)
class FreePages:
    """Pages that no job has and that may be posted now, all for the same reason.

    `as_before`: they are all pages of an earlier post and are posted as one job again. So they
    have the same request key, under which the handler has stored the pages that it has read.
    """

    reason: PostReason
    numbers: tuple[int, ...]
    as_before: bool = False


def open_job(run: ClaimedRun, job: NewJob, *, max_live: int) -> str | None:
    """Commit a post's row and its claim on the pages before the post is made; return its id.

    Return None if the endpoint has `max_live` live jobs. Raises LeaseLost, also if another job
    has one of the pages.
    """
    job_id = new_id()
    with begin() as connection:
        connection.execute(select(func.pg_advisory_xact_lock(_endpoint_lock(job))))
        if _live_jobs(connection, job) >= max_live:
            return None
        fence(connection, run, epoch=Run.epoch)
        connection.execute(insert(RemoteJob).values(_columns(job_id, run, job)))
        claimed = connection.execute(
            update(Page)
            .where(
                Page.run_id == run.id,
                Page.number.in_(job.pages),
                Page.state == PageState.PENDING,
                Page.remote_job_id.is_(None),
            )
            .values(remote_job_id=job_id, hand_epoch=run.epoch)
        )
        if claimed.rowcount != len(job.pages):
            raise LeaseLost("Another job has one of these pages.")
    return job_id


def _columns(job_id: str, run: ClaimedRun, job: NewJob) -> dict[str, Any]:
    now = func.clock_timestamp()
    return {
        "id": job_id,
        "run_id": run.id,
        "base_url": job.base_url,
        "endpoint_id": job.endpoint_id,
        "token_sha256": job.token_sha256,
        "request_key": job.request_key,
        "pages": list(job.pages),
        "reason": job.reason,
        "state": JobState.SUBMITTING,
        "epoch": run.epoch,
        "submitted_at": now,
        "expires_at": now + timedelta(seconds=job.ttl),
        "next_poll_at": now,
        "usd_per_second": job.usd_per_second,
    }


def _endpoint_lock(job: NewJob) -> ColumnElement[int]:
    return func.hashtextextended(f"endpoint:{job.base_url}/{job.endpoint_id}", 0)


def _live_jobs(connection: Connection, job: NewJob) -> int:
    count = select(func.count()).where(
        RemoteJob.base_url == job.base_url,
        RemoteJob.endpoint_id == job.endpoint_id,
        RemoteJob.state != JobState.ENDED,
    )
    return connection.scalar(count) or 0


def store_remote_id(job_id: str, remote_id: str) -> None:
    """Store the id that a post returned. This is the only write without a check of the epoch.

    If the run has ended meanwhile, the job is marked for cancellation.
    """
    over = select(Run.id).where(Run.id == RemoteJob.run_id, Run.state.in_(TERMINAL)).exists()
    with begin() as connection:
        connection.execute(
            update(RemoteJob)
            .where(RemoteJob.id == job_id, RemoteJob.remote_id.is_(None))
            .values(
                remote_id=clean(remote_id),
                state=JobState.LIVE,
                cancel_wanted=or_(RemoteJob.cancel_wanted, over),
                next_poll_at=func.clock_timestamp(),
            )
        )


def note_refused(job_id: str, message: str) -> None:
    """Free the pages of a post that was certainly not accepted.

    A post that has its id, or whose answer was lost, is not changed.
    """
    unanswered = select(RemoteJob.id).where(
        RemoteJob.id == job_id, RemoteJob.state == JobState.SUBMITTING
    )
    with begin() as connection:
        if connection.scalar(unanswered.with_for_update()) is not None:
            columns = {"error_message": clean(message)}
            end_job(connection, job_id, JobEnd(JobOutcome.REFUSED, columns=columns))


def note_lost(job_id: str, message: str) -> None:
    """Mark a post that got no answer as lost: the job may exist."""
    with begin() as connection:
        connection.execute(
            update(RemoteJob)
            .where(RemoteJob.id == job_id, RemoteJob.state == JobState.SUBMITTING)
            .values(
                state=JobState.LOST,
                lost_at=func.clock_timestamp(),
                error_message=clean(message),
            )
        )


def note_interrupted(run: ClaimedRun) -> int:
    """Mark posts of earlier claims that got no answer as lost; return their number.

    Polls that an earlier claim began and did not end are due again at once.
    """
    with begin() as connection:
        connection.execute(
            update(RemoteJob)
            .where(RemoteJob.run_id == run.id, RemoteJob.state != JobState.ENDED)
            .values(polled_until=None)
        )
        found = connection.execute(
            update(RemoteJob)
            .where(
                RemoteJob.run_id == run.id,
                RemoteJob.state == JobState.SUBMITTING,
                RemoteJob.epoch < run.epoch,
            )
            .values(state=JobState.LOST, lost_at=func.clock_timestamp())
        )
        return found.rowcount


def note_abandoned() -> int:
    """Mark posts as lost whose fork no longer holds the run; return their number."""
    held = (
        select(Run.id)
        .where(Run.id == RemoteJob.run_id, Run.epoch == RemoteJob.epoch, Run.state.in_(HELD))
        .exists()
    )
    with begin() as connection:
        found = connection.execute(
            update(RemoteJob)
            .where(RemoteJob.state == JobState.SUBMITTING, ~held)
            .values(state=JobState.LOST, lost_at=func.clock_timestamp())
        )
        return found.rowcount


def free_lost(run: ClaimedRun, job_id: str) -> None:
    """End a lost post so that its pages are posted again. Raises LeaseLost."""
    with begin() as connection:
        fence(connection, run, epoch=Run.epoch)
        connection.execute(
            update(Page)
            .where(Page.run_id == run.id, Page.remote_job_id == job_id)
            .values(repost_reason=PostReason.LOST_ANSWER)
        )
        end_job(connection, job_id, JobEnd(JobOutcome.REPEATED))


def free_pages(run: ClaimedRun) -> list[FreePages]:
    """Return the pending pages that no job has and whose time has come, in order."""
    with begin() as connection:
        free = [
            (number, PostReason(reason or PostReason.FIRST))
            for number, reason in connection.execute(
                select(Page.number, Page.repost_reason).where(_is_free(run)).order_by(Page.number)
            )
        ]
        newest_first = [post.pages for post in reversed(_posts(connection, run))]
    return _grouped(free, newest_first)


def exhausted_pages(run: ClaimedRun, limit: int) -> dict[int, list[PostReason]]:
    """Return the free pages that were posted at least `limit` times, with the reasons in order."""
    with begin() as connection:
        free = connection.scalars(select(Page.number).where(_is_free(run))).all()
        posts = _posts(connection, run)
    reasons = {
        number: [PostReason(post.reason) for post in posts if number in post.pages]
        for number in sorted(free)
    }
    return {number: found for number, found in reasons.items() if len(found) >= limit}


def _is_free(run: ClaimedRun) -> ColumnElement[bool]:
    """Return the condition that a page of the run may be posted now."""
    return and_(
        Page.run_id == run.id,
        Page.state == PageState.PENDING,
        Page.remote_job_id.is_(None),
        or_(Page.retry_at.is_(None), Page.retry_at <= func.clock_timestamp()),
    )


def _posts(connection: Connection, run: ClaimedRun) -> Sequence[Row[list[int], str]]:
    """Return pages and reason of the run's posts that may have been accepted, oldest first."""
    query = select(RemoteJob.pages, RemoteJob.reason).where(
        RemoteJob.run_id == run.id, RemoteJob.outcome.is_distinct_from(JobOutcome.REFUSED)
    )
    return connection.execute(query.order_by(RemoteJob.submitted_at)).all()


def _grouped(
    free: Iterable[tuple[int, PostReason]], newest_first: Sequence[list[int]]
) -> list[FreePages]:
    """Group the pages by reason; all pages of one earlier post stay together, as that post."""
    reasons = dict(free)
    groups: list[FreePages] = []
    for post in newest_first:
        pages = tuple(post)
        found = {reasons.get(number) for number in pages}
        if len(found) == 1 and (reason := found.pop()) not in (None, PostReason.FIRST):
            groups.append(FreePages(reason, pages, as_before=True))
            for number in pages:
                del reasons[number]
    newly_cut: dict[PostReason, list[int]] = defaultdict(list)
    for number, reason in reasons.items():
        newly_cut[reason].append(number)
    groups += [FreePages(reason, tuple(numbers)) for reason, numbers in newly_cut.items()]
    return sorted(groups, key=lambda group: group.numbers)


def wake_for_reposts(after_lost: float) -> int:
    """Make remote runs claimable whose lost answer is `after_lost` seconds old; return how many.

    A post that repeated a lost one is not posted again, so its run stays as it is.
    """
    due = select(RemoteJob.run_id).where(
        RemoteJob.state == JobState.LOST,
        RemoteJob.reason != PostReason.LOST_ANSWER,
        RemoteJob.lost_at < func.clock_timestamp() - timedelta(seconds=after_lost),
    )
    with begin() as connection:
        woken = connection.execute(
            update(Run)
            .where(Run.state == RunState.REMOTE, Run.id.in_(due))
            .values(state=RunState.READY)
        )
        return woken.rowcount
