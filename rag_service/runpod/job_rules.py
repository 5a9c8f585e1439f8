"""The durable remote job: what each answer of RunPod means for it. Used by poster and poller.

Pure rules; the rows are the knowledgebase's, the requests the client's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import ValidationError

from rag_service.config.options import RunPodOptions
from rag_service.errors import (
    PageError,
    RemoteJobCancelled,
    RemoteJobExpired,
    RemoteJobFailed,
    RemoteJobTimedOut,
    RemoteResultMissing,
)
from rag_service.runpod.job_format import JobOutput
from rag_service.runpod.runpod_client import JobReport, JobStatus
from rag_service.states import JobOutcome, PostReason

# Polls come further apart as a job grows older: a twentieth of its age.
_AGE_SHARE = 20


class PolledJob(Protocol):
    """What the rules need to know of a post; `age`, and `left` until its ttl, in seconds."""

    @property
    def request_key(self) -> str: ...
    @property
    def reason(self) -> PostReason: ...
    @property
    def cancel_wanted(self) -> bool: ...
    @property
    def deadline_passed(self) -> bool: ...
    @property
    def age(self) -> float: ...
    @property
    def left(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing has come of it yet: poll again after so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class CancelIt:
    """Its time is over: cancel, and ask again until the service confirms."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The job is over. `output` where it brought one; pages it does not settle get `error`,
    after one repost where `repost` says why there may be one. None: we cancelled it, so its
    pages are nobody's failures.
    """

    outcome: JobOutcome
    error: PageError | None
    output: JobOutput | None = None
    repost: PostReason | None = None


Verdict = Wait | CancelIt | Ended


def request_key(run_id: str, options_digest: str, pages: Sequence[int]) -> str:
    """The key under which the handler does a request's work once."""
    digest = hashlib.sha256(",".join(map(str, pages)).encode()).hexdigest()[:16]
    return f"{run_id}:{options_digest}:{digest}"


def poll_interval(age: float, settings: RunPodOptions) -> float:
    """Seconds until the next poll of a job of this age."""
    return min(settings.poll_max, max(settings.poll_min, age / _AGE_SHARE))


def judge(job: PolledJob, report: JobReport, settings: RunPodOptions) -> Verdict:
    """What a status answer means for the job."""
    if not report.pending:
        return _ended(job, report)
    if job.left <= -settings.deadline_margin and (job.cancel_wanted or job.deadline_passed):
        return judge_unknown(job, settings)
    if job.cancel_wanted or job.left <= settings.deadline_margin:
        return CancelIt()
    return Wait(poll_interval(job.age, settings))


def judge_unknown(job: PolledJob, settings: RunPodOptions) -> Verdict:
    """What a 404 means: by the job's age not yet visible, dropped, or expired."""
    if job.cancel_wanted:
        return Ended(JobOutcome.CANCELLED, None)
    if job.deadline_passed:
        return _timed_out()
    if job.age < settings.visible_after:
        return Wait(poll_interval(job.age, settings))
    if job.left > 0:
        return Ended(
            JobOutcome.MISSING,
            RemoteResultMissing("RunPod does not know the job any more, before its time."),
            repost=_once(job, PostReason.EXPIRED),
        )
    return Ended(JobOutcome.EXPIRED, RemoteJobExpired(), repost=_once(job, PostReason.EXPIRED))


def judge_silence(job: PolledJob, settings: RunPodOptions, wait: float) -> Verdict:
    """What no answer means: wait for one, but not past the time at which the job is gone anyway."""
    if job.left <= -settings.deadline_margin:
        return judge_unknown(job, settings)
    return Wait(wait)


def _timed_out() -> Ended:
    """Its deadline is over: the same again would take as long."""
    return Ended(JobOutcome.TIMED_OUT, RemoteJobTimedOut())


def _once(job: PolledJob, reason: PostReason) -> PostReason | None:
    return None if job.reason is reason else reason


def _ended(job: PolledJob, report: JobReport) -> Ended:
    second = PostReason.SECOND_TRY
    completed = _completed(job, report) if report.status is JobStatus.COMPLETED else None
    if job.cancel_wanted and (completed is None or completed.output is None):
        return Ended(JobOutcome.CANCELLED, None)
    if completed is not None:
        return completed
    if job.deadline_passed:
        return _timed_out()
    if report.status is JobStatus.CANCELLED:
        return Ended(JobOutcome.CANCELLED, RemoteJobCancelled())
    if report.status is JobStatus.TIMED_OUT:
        return Ended(JobOutcome.TIMED_OUT, RemoteJobTimedOut(), repost=second)
    message = report.error or "RunPod names no reason"
    return Ended(
        JobOutcome.FAILED, RemoteJobFailed(f"The job failed on RunPod: {message}"), repost=second
    )


def _completed(job: PolledJob, report: JobReport) -> Ended:
    """COMPLETED says nothing by itself: the output must be there, whole and ours."""
    missing = Ended(
        JobOutcome.MISSING,
        RemoteResultMissing("RunPod says COMPLETED and brings no usable output."),
        repost=PostReason.SECOND_TRY,
    )
    try:
        output = JobOutput.model_validate(report.output)
    except ValidationError:
        return missing
    if output.request_key != job.request_key:
        return missing
    return Ended(
        JobOutcome.COMPLETED,
        RemoteResultMissing("The job's output does not mention the page."),
        output=output,
        repost=PostReason.SECOND_TRY,
    )


def token_digest(token: str) -> str:
    """What is stored of a webhook's token."""
    return hashlib.sha256(token.encode()).hexdigest()
