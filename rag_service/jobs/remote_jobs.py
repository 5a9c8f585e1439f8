"""Posts to other services: made once, found again after any crash, settled once. Used by workers.

One live job a page: pages.remote_job_id is the claim, taken with the row before the post and
given back when the job ends. No epoch is asked of a result: only the page's own job may settle it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Row, Select, case, func, insert, or_, select, update
from sqlalchemy.sql import ColumnElement

from rag_service.database.engine import begin
from rag_service.database.models import Page, RemoteJob, Run, new_id
from rag_service.database.storable_text import clean, clean_tree
from rag_service.errors import LeaseLost
from rag_service.jobs.endings import UNCLAIMED, WORKED
from rag_service.jobs.leases import ClaimedRun, fence
from rag_service.jobs.run_pages import PROGRESS, StoredPage, store_job_pages
from rag_service.states import (
    HELD,
    TERMINAL,
    JobOutcome,
    JobState,
    PageState,
    PostReason,
    RunState,
)

# A poller that dies gives its jobs back after this many seconds.
_POLL_CLAIM_SECONDS = 60.0
_OVERDUE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class NewJob:
    """A post about to be made; the price is kept with it."""

    base_url: str
    endpoint_id: str
    request_key: str
    token_sha256: str
    pages: tuple[int, ...]
    reason: PostReason
    ttl: float
    usd_per_second: float


@dataclass(frozen=True, slots=True)
class JobRow:
    """One post; `age` since it was made and `left` until its ttl, in seconds."""

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
class FreePages:
    """Pages that no job has: they may be posted now, all for one reason.

    Those of a lost answer are all that the lost post had, since its request key names them.
    """

    reason: PostReason
    numbers: tuple[int, ...]


def open_job(run: ClaimedRun, job: NewJob, *, most_live: int) -> str | None:
    """Commit a post before it is made, with its claim on the pages; None at the endpoint's limit.

    Raises LeaseLost, also where another job has one of the pages.
    """
    job_id = new_id()
    with begin() as connection:
        connection.execute(select(func.pg_advisory_xact_lock(_endpoint_key(job))))
        if _live_on(connection, job) >= most_live:
            return None
        fence(connection, run, epoch=Run.epoch)
        connection.execute(insert(RemoteJob).values(_row(job_id, run, job)))
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


def _row(job_id: str, run: ClaimedRun, job: NewJob) -> dict[str, Any]:
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


def _endpoint_key(job: NewJob) -> ColumnElement[int]:
    return func.hashtextextended(f"endpoint:{job.base_url}/{job.endpoint_id}", 0)


def _live_on(connection: Connection, job: NewJob) -> int:
    count = select(func.count()).where(
        RemoteJob.base_url == job.base_url,
        RemoteJob.endpoint_id == job.endpoint_id,
        RemoteJob.state != JobState.ENDED,
    )
    return connection.scalar(count) or 0


def store_remote_id(job_id: str, remote_id: str) -> None:
    """Keep the id that a post brought back: the one write that no epoch is asked for.

    Where the run has ended meanwhile, the job is to be cancelled.
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
    """The post was certainly not accepted: its pages are free again.

    One that has its id, or whose answer was lost, stays what it is.
    """
    unanswered = select(RemoteJob.id).where(
        RemoteJob.id == job_id, RemoteJob.state == JobState.SUBMITTING
    )
    with begin() as connection:
        if connection.scalar(unanswered.with_for_update()) is not None:
            _end(connection, job_id, JobOutcome.REFUSED, {"error_message": clean(message)})


def note_lost(job_id: str, message: str) -> None:
    """The post brought no answer: the job may exist."""
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
    """Posts of earlier claims that never came to an answer are lost answers; how many.

    What an earlier holder was polling when it died is due again at once.
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


def repeat(run: ClaimedRun, job_id: str) -> None:
    """Give a lost post's pages to the one that repeats it. Raises LeaseLost."""
    with begin() as connection:
        fence(connection, run, epoch=Run.epoch)
        connection.execute(
            update(Page)
            .where(Page.run_id == run.id, Page.remote_job_id == job_id)
            .values(repost_reason=PostReason.LOST_ANSWER)
        )
        _end(connection, job_id, JobOutcome.REPEATED, {})


def jobs_of(run_id: str) -> list[JobRow]:
    """The run's jobs that have not ended, oldest first."""
    with begin() as connection:
        query = _jobs().where(RemoteJob.run_id == run_id, RemoteJob.state != JobState.ENDED)
        return [_job(row) for row in connection.execute(query.order_by(RemoteJob.submitted_at))]


def free_pages(run: ClaimedRun) -> list[FreePages]:
    """Pending pages that no job has and whose time has come, in order."""
    posts = select(RemoteJob.pages).where(RemoteJob.run_id == run.id)
    query = (
        select(Page.number, Page.repost_reason)
        .where(
            Page.run_id == run.id,
            Page.state == PageState.PENDING,
            Page.remote_job_id.is_(None),
            or_(Page.retry_at.is_(None), Page.retry_at <= func.clock_timestamp()),
        )
        .order_by(Page.number)
    )
    with begin() as connection:
        free = [
            (number, PostReason(reason or PostReason.FIRST))
            for number, reason in connection.execute(query)
        ]
        newest_first = connection.scalars(posts.order_by(RemoteJob.submitted_at.desc())).all()
    return _grouped(free, newest_first)


def _grouped(
    free: Iterable[tuple[int, PostReason]], newest_first: Sequence[list[int]]
) -> list[FreePages]:
    groups: dict[tuple[PostReason, tuple[int, ...]], list[int]] = defaultdict(list)
    for number, reason in free:
        post: tuple[int, ...] = ()
        if reason is PostReason.LOST_ANSWER:
            post = next((tuple(pages) for pages in newest_first if number in pages), ())
        groups[reason, post].append(number)
    return [FreePages(reason, tuple(numbers)) for (reason, _), numbers in groups.items()]


def reasons_so_far(run_id: str) -> dict[int, set[PostReason]]:
    """Why each page of the run was posted until now."""
    reasons: dict[int, set[PostReason]] = defaultdict(set)
    query = select(RemoteJob.reason, RemoteJob.pages).where(RemoteJob.run_id == run_id)
    with begin() as connection:
        for reason, numbers in connection.execute(query):
            for number in numbers:
                reasons[number].add(PostReason(reason))
    return reasons


def claim_due(limit: int, *, run_id: str | None = None) -> list[JobRow]:
    """Jobs whose poll is due, claimed for this poller.

    Without a run: those that no fork looks after, and those to be cancelled.
    """
    now = func.clock_timestamp()
    held = select(Run.id).where(Run.id == RemoteJob.run_id, Run.state.in_(HELD)).exists()
    # A fork may be busy with the pages that it has yet to post; results do not wait for ever.
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


def note_poll(
    job_id: str,
    *,
    next_in: float,
    status: str | None = None,
    delay_ms: int | None = None,
    execution_ms: int | None = None,
    error: str | None = None,
    adopted_id: str | None = None,
    deadline_passed: bool = False,
) -> None:
    """The poll brought no end: give the claim back until the next.

    `error` is what a failed poll said, empty where it was answered; None: nobody was asked.
    """
    began = RemoteJob.polled_until - timedelta(seconds=_POLL_CLAIM_SECONDS)
    planned = func.clock_timestamp() + timedelta(seconds=next_in)
    # A webhook or a cancel that came during the poll wants another at once.
    wanted = case((RemoteJob.next_poll_at > began, RemoteJob.next_poll_at), else_=planned)
    values: dict[str, Any] = {
        "polls": RemoteJob.polls + 1,
        "next_poll_at": wanted,
        "polled_until": None,
    }
    told = {"last_status": status, "delay_ms": delay_ms, "execution_ms": execution_ms}
    values |= {name: value for name, value in told.items() if value is not None}
    if error is not None:
        values["error_message"] = clean(error) or None
    if deadline_passed:
        values["deadline_passed"] = True
    if adopted_id is not None:
        # The post's own answer may have come meanwhile.
        remote_id = func.coalesce(RemoteJob.remote_id, clean(adopted_id))
        values |= {"remote_id": remote_id, "state": JobState.LIVE}
    with begin() as connection:
        connection.execute(
            update(RemoteJob)
            .where(RemoteJob.id == job_id, RemoteJob.state != JobState.ENDED)
            .values(**values)
        )


def settle(
    job: JobRow,
    outcome: JobOutcome,
    pages: Sequence[StoredPage],
    reasons: Mapping[int, PostReason],
    told: Mapping[str, Any],
) -> bool:
    """End the job, store its pages, free the rest: in one transaction, once.

    `reasons`: why a page that stays pending would be posted again. False where the job had
    been settled before. A run that no fork holds becomes claimable.
    """
    with begin() as connection:
        # The run's row first: the order in which everybody locks.
        connection.execute(select(Run.id).where(Run.id == job.run_id).with_for_update())
        if not _end(connection, job.id, outcome, dict(clean_tree(told)), reasons, pages):
            return False
        if any(page.retry_in is None for page in pages):
            connection.execute(update(Run).where(Run.id == job.run_id).values(**PROGRESS))
        connection.execute(
            update(Run)
            .where(Run.id == job.run_id, Run.state == RunState.REMOTE)
            .values(state=RunState.READY)
        )
    return True


def _end(
    connection: Connection,
    job_id: str,
    outcome: JobOutcome,
    told: Mapping[str, Any],
    reasons: Mapping[int, PostReason] | None = None,
    pages: Sequence[StoredPage] = (),
) -> bool:
    ended = connection.execute(
        update(RemoteJob)
        .where(RemoteJob.id == job_id, RemoteJob.state != JobState.ENDED)
        .values(
            state=JobState.ENDED,
            outcome=outcome,
            ended_at=func.clock_timestamp(),
            polled_until=None,
            **told,
        )
    )
    if ended.rowcount != 1:
        return False
    store_job_pages(connection, job_id, pages)
    for number, reason in (reasons or {}).items():
        connection.execute(
            update(Page)
            .where(Page.remote_job_id == job_id, Page.number == number)
            .values(repost_reason=reason)
        )
    connection.execute(update(Page).where(Page.remote_job_id == job_id).values(remote_job_id=None))
    return True


def leave_to_maintenance(run: ClaimedRun) -> None:
    """Jobs are live and the fork goes on to another run. Raises LeaseLost."""
    live = select(RemoteJob.id).where(RemoteJob.run_id == run.id, RemoteJob.state != JobState.ENDED)
    with begin() as connection:
        # The row first: a job that ends at this moment finds the run held and does not wake it,
        # and a statement that waited for the row would still see that job alive.
        fence(connection, run, epoch=Run.epoch)
        alive = connection.scalar(live.limit(1)) is not None
        state = RunState.REMOTE if alive else RunState.READY
        fence(connection, run, state=state, worked_seconds=WORKED, **UNCLAIMED)


def wake_for_reposts(after_lost: float) -> int:
    """Remote runs whose lost answer is due to be repeated become claimable; how many."""
    due = select(RemoteJob.run_id).where(
        RemoteJob.state == JobState.LOST,
        RemoteJob.lost_at < func.clock_timestamp() - timedelta(seconds=after_lost),
    )
    with begin() as connection:
        woken = connection.execute(
            update(Run)
            .where(Run.state == RunState.REMOTE, Run.id.in_(due))
            .values(state=RunState.READY)
        )
        return woken.rowcount


def hint(token_sha256: str, remote_id: str) -> bool:
    """A webhook came: poll at once, and remember the id where the post's answer was lost.

    False where no post has this token.
    """
    ours = RemoteJob.token_sha256 == token_sha256
    with begin() as connection:
        connection.execute(
            update(RemoteJob)
            .where(ours, RemoteJob.state != JobState.ENDED)
            .values(hinted_id=clean(remote_id), next_poll_at=func.clock_timestamp())
        )
        return connection.scalar(select(RemoteJob.id).where(ours)) is not None


def forget_hint(job_id: str, remote_id: str) -> None:
    """The service does not confirm the id that a webhook brought: the answer is lost still."""
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
        func.extract("epoch", now - RemoteJob.submitted_at),
        func.extract("epoch", RemoteJob.expires_at - now),
        func.extract("epoch", now - RemoteJob.lost_at),
    )


def _job(row: Row[*tuple[Any, ...]]) -> JobRow:
    values = list(row)
    values[7] = tuple(values[7])
    values[8] = PostReason(values[8])
    values[9] = JobState(values[9])
    values[12:14] = [float(value) for value in values[12:14]]
    values[14] = None if values[14] is None else float(values[14])
    return JobRow(*values)
