"""Rows of remote jobs while they are polled: claimed for a poll, noted, settled once.

A result needs no check of the run's epoch: only the page's own job can settle it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Row, Select, case, func, or_, select, update

from rag_service.database.engine import begin
from rag_service.database.models import Page, RemoteJob, Run
from rag_service.database.storable_text import clean, clean_tree
from rag_service.jobs.endings import UNCLAIMED, WORKED
from rag_service.jobs.leases import ClaimedRun, fence
from rag_service.jobs.run_pages import PROGRESS, StoredPage, store_job_pages
from rag_service.states import HELD, JobOutcome, JobState, PostReason, RunState

# A job whose poller died is polled by another one after this many seconds.
_POLL_CLAIM_SECONDS = 60.0
_OVERDUE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class JobRow:
    """One post. `age` since it was made, `left` until its ttl and `lost_for`, all in seconds.

    `hinted_id`: a job id from a webhook that RunPod has not confirmed yet.
    """

    id: str
    run_id: str
    base_url: str
    endpoint_id: str
    remote_id: str | None
    hinted_id: str | None
    request_key: str
    pages: tuple[int, ...]
    reason: PostReason
    state: JobState
    cancel_wanted: bool
    deadline_passed: bool
    age: float
    left: float
    lost_for: float | None


@dataclass(frozen=True, slots=True)
class PollNote:
    """The values that a poll of a live job writes to its row; None keeps the stored value.

    `next_in`: seconds until the next poll. `error`: the message of a failed poll, empty if it was
    answered. `adopted_id`: the id from a webhook that RunPod confirmed.
    """

    next_in: float
    status: str | None = None
    delay_ms: int | None = None
    execution_ms: int | None = None
    error: str | None = None
    adopted_id: str | None = None
    deadline_passed: bool = False


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of a job. `reposts`: for which reason a page that stays pending is posted again.

    `columns`: further columns of the job's row.
    """

    outcome: JobOutcome
    pages: Sequence[StoredPage] = ()
    reposts: Mapping[int, PostReason] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)


def jobs_of(run_id: str) -> list[JobRow]:
    """Return the run's jobs that have not ended, oldest first."""
    with begin() as connection:
        query = _jobs().where(RemoteJob.run_id == run_id, RemoteJob.state != JobState.ENDED)
        return [_job(row) for row in connection.execute(query.order_by(RemoteJob.submitted_at))]


def reasons_so_far(run_id: str) -> dict[int, set[PostReason]]:
    """Return for which reasons each page of the run was posted until now."""
    reasons: dict[int, set[PostReason]] = defaultdict(set)
    query = select(RemoteJob.reason, RemoteJob.pages).where(RemoteJob.run_id == run_id)
    with begin() as connection:
        for reason, numbers in connection.execute(query):
            for number in numbers:
                reasons[number].add(PostReason(reason))
    return reasons


def claim_due(limit: int, *, run_id: str | None = None) -> list[JobRow]:
    """Claim jobs whose poll is due, for one poller.

    Without `run_id`: jobs whose run no fork holds, jobs to be cancelled, and overdue jobs.
    """
    now = func.clock_timestamp()
    held = select(Run.id).where(Run.id == RemoteJob.run_id, Run.state.in_(HELD)).exists()
    # A fork may be busy with pages that it has yet to post; results must not wait for that.
    overdue = RemoteJob.next_poll_at < now - timedelta(seconds=_OVERDUE_SECONDS)
    query = select(RemoteJob.id).where(
        RemoteJob.state != JobState.ENDED,
        RemoteJob.next_poll_at <= now,
        or_(RemoteJob.polled_until.is_(None), RemoteJob.polled_until < now),
    )
    query = (
        query.where(RemoteJob.run_id == run_id)
        if run_id is not None
        else query.where(or_(~held, RemoteJob.cancel_wanted, overdue))
    )
    chosen = query.order_by(RemoteJob.next_poll_at).limit(limit)
    until = now + timedelta(seconds=_POLL_CLAIM_SECONDS)
    with begin() as connection:
        ids = connection.scalars(chosen.with_for_update(skip_locked=True)).all()
        connection.execute(
            update(RemoteJob).where(RemoteJob.id.in_(ids)).values(polled_until=until)
        )
        rows = connection.execute(_jobs().where(RemoteJob.id.in_(ids)))
        return [_job(row) for row in rows]


def note_poll(job_id: str, note: PollNote) -> None:
    """Release the claim of a poll of a job that is still live."""
    began = RemoteJob.polled_until - timedelta(seconds=_POLL_CLAIM_SECONDS)
    planned = func.clock_timestamp() + timedelta(seconds=note.next_in)
    # A webhook or a cancel that came during the poll asks for another poll at once.
    next_poll = case((RemoteJob.next_poll_at > began, RemoteJob.next_poll_at), else_=planned)
    values = _noted_columns(note) | {
        "polls": RemoteJob.polls + 1,
        "next_poll_at": next_poll,
        "polled_until": None,
    }
    with begin() as connection:
        connection.execute(
            update(RemoteJob)
            .where(RemoteJob.id == job_id, RemoteJob.state != JobState.ENDED)
            .values(**values)
        )


def _noted_columns(note: PollNote) -> dict[str, Any]:
    reported = {
        "last_status": note.status,
        "delay_ms": note.delay_ms,
        "execution_ms": note.execution_ms,
    }
    values: dict[str, Any] = {k: value for k, value in reported.items() if value is not None}
    if note.error is not None:
        values["error_message"] = clean(note.error) or None
    if note.deadline_passed:
        values["deadline_passed"] = True
    if note.adopted_id is not None:
        # The post's own answer may have come meanwhile.
        remote_id = func.coalesce(RemoteJob.remote_id, clean(note.adopted_id))
        values |= {"remote_id": remote_id, "state": JobState.LIVE}
    return values


def settle(job: JobRow, end: JobEnd) -> bool:
    """End the job, store its pages and free the others, once and in one transaction.

    Return False if the job had ended before. A run that no fork holds becomes claimable.
    """
    with begin() as connection:
        # The run's row first: all transactions lock in this order.
        connection.execute(select(Run.id).where(Run.id == job.run_id).with_for_update())
        if not end_job(connection, job.id, end):
            return False
        if any(page.retry_in is None for page in end.pages):
            connection.execute(update(Run).where(Run.id == job.run_id).values(**PROGRESS))
        connection.execute(
            update(Run)
            .where(Run.id == job.run_id, Run.state == RunState.REMOTE)
            .values(state=RunState.READY)
        )
    return True


def end_job(connection: Connection, job_id: str, end: JobEnd) -> bool:
    """End a job within a transaction; return False if it had ended before."""
    ended = connection.execute(
        update(RemoteJob)
        .where(RemoteJob.id == job_id, RemoteJob.state != JobState.ENDED)
        .values(
            state=JobState.ENDED,
            outcome=end.outcome,
            ended_at=func.clock_timestamp(),
            polled_until=None,
            **dict(clean_tree(end.columns)),
        )
    )
    if ended.rowcount != 1:
        return False
    store_job_pages(connection, job_id, end.pages)
    for number, reason in end.reposts.items():
        connection.execute(
            update(Page)
            .where(Page.remote_job_id == job_id, Page.number == number)
            .values(repost_reason=reason)
        )
    connection.execute(update(Page).where(Page.remote_job_id == job_id).values(remote_job_id=None))
    return True


def leave_to_maintenance(run: ClaimedRun) -> RunState:
    """Release a run whose jobs are live; maintenance polls them. Return the state that it has now.

    Raises LeaseLost.
    """
    live = select(RemoteJob.id).where(RemoteJob.run_id == run.id, RemoteJob.state != JobState.ENDED)
    with begin() as connection:
        # The run's row first: a job that ends at this moment finds the run held and does not make
        # it claimable, and a statement that waited for the row would still see that job as live.
        fence(connection, run, epoch=Run.epoch)
        alive = connection.scalar(live.limit(1)) is not None
        state = RunState.REMOTE if alive else RunState.READY
        fence(connection, run, state=state, worked_seconds=WORKED, **UNCLAIMED)
    return state


def has_token(token_sha256: str) -> bool:
    """Return whether a post has this token."""
    query = select(RemoteJob.id).where(RemoteJob.token_sha256 == token_sha256)
    with begin() as connection:
        return connection.scalar(query) is not None


def hint(token_sha256: str, remote_id: str) -> bool:
    """Record a webhook: poll its job at once, and keep the id in case the post's answer is lost.

    Return False if no post has this token.
    """
    query = select(RemoteJob.id, RemoteJob.run_id, RemoteJob.request_key, RemoteJob.outcome).where(
        RemoteJob.token_sha256 == token_sha256
    )
    with begin() as connection:
        post = connection.execute(query).one_or_none()
        if post is None:
            return False
        # The post that repeats this one has the same request key, so the job is its job too.
        repeated = post.outcome == JobOutcome.REPEATED
        same_work = (
            (RemoteJob.run_id == post.run_id)
            & (RemoteJob.request_key == post.request_key)
            & RemoteJob.remote_id.is_(None)
        )
        connection.execute(
            update(RemoteJob)
            .where(same_work if repeated else RemoteJob.id == post.id)
            .where(RemoteJob.state != JobState.ENDED)
            .values(hinted_id=clean(remote_id), next_poll_at=func.clock_timestamp())
        )
        return True


def forget_hint(job_id: str, remote_id: str) -> None:
    """Remove an id from a webhook that the other service does not confirm."""
    with begin() as connection:
        connection.execute(
            update(RemoteJob)
            .where(RemoteJob.id == job_id, RemoteJob.hinted_id == clean(remote_id))
            .values(hinted_id=None)
        )


def _jobs() -> Select[*tuple[Any, ...]]:
    now = func.clock_timestamp()
    return select(
        RemoteJob.id,
        RemoteJob.run_id,
        RemoteJob.base_url,
        RemoteJob.endpoint_id,
        RemoteJob.remote_id,
        RemoteJob.hinted_id,
        RemoteJob.request_key,
        RemoteJob.pages,
        RemoteJob.reason,
        RemoteJob.state,
        RemoteJob.cancel_wanted,
        RemoteJob.deadline_passed,
        func.extract("epoch", now - RemoteJob.submitted_at).label("age"),
        func.extract("epoch", RemoteJob.expires_at - now).label("left"),
        func.extract("epoch", now - RemoteJob.lost_at).label("lost_for"),
    )


def _job(row: Row[*tuple[Any, ...]]) -> JobRow:
    columns = dict(row._mapping)
    columns["pages"] = tuple(columns["pages"])
    columns["reason"] = PostReason(columns["reason"])
    columns["state"] = JobState(columns["state"])
    for name in ("age", "left", "lost_for"):
        columns[name] = None if columns[name] is None else float(columns[name])
    return JobRow(**columns)
