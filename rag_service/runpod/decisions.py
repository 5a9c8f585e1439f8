"""All rules of a remote job: what each answer of RunPod means for it.

Pure functions: no clock, no database, no network. `decide` judges a poll, `decide_post` the answer
to a post, `may_repost_lost` a post whose answer was lost. `workers/remote/` carries the outcomes
out.
"""

from __future__ import annotations

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
from rag_service.runpod.runpod_client import (
    BodyRefused,
    EndpointRefused,
    JobReport,
    JobStatus,
    LostAnswer,
    NotAccepted,
    Unreachable,
)
from rag_service.runtime.retry import LONGEST_RETRY_AFTER
from rag_service.states import JobOutcome, PostReason

# The poll interval grows with the job: a twentieth of its age.
_AGE_SHARE = 20
# Seconds until the next request after RunPod refused the key.
REFUSED_PAUSE = 30.0
_REASON_LETTERS = 300


class PolledJob(Protocol):
    """The part of a job's row that the rules use; `age`, and `left` until its ttl, in seconds.

    `remote_id` is None until the post's answer has returned it. `deadline_passed`: the service
    asked for its cancellation because its ttl is near.
    """

    @property
    def remote_id(self) -> str | None: ...
    @property
    def hinted_id(self) -> str | None: ...
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
    @property
    def lost_for(self) -> float | None: ...


# Reports: the results of a poll, besides the client's JobReport.


@dataclass(frozen=True, slots=True)
class UnknownJob:
    """HTTP 404: RunPod does not know the job."""


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """No usable answer: no connection, a time-out, 429, 5xx, or a body that is no status."""

    message: str
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class KeyRefused:
    """HTTP 401 or 403: RunPod does not accept the API key."""

    message: str


@dataclass(frozen=True, slots=True)
class NoJobId:
    """RunPod was not asked: neither the post nor a webhook has returned an id yet."""


PollReport = JobReport | UnknownJob | NoAnswer | KeyRefused | NoJobId


# Outcomes of a poll.


@dataclass(frozen=True, slots=True)
class KeepWaiting:
    """The job is live: poll again in `seconds`; with `jitter` if a Retry-After set the time."""

    seconds: float
    jitter: bool = False


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Ask RunPod to cancel the job, and poll again in `seconds` until it confirms.

    `for_deadline`: its ttl is near; otherwise its run was cancelled.
    """

    seconds: float
    for_deadline: bool


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job is over; `output` if it returned a usable one.

    A page that `output` does not settle is posted again with the reason `repost`, unless that is
    None or the page was posted for it before; then the page fails with `error`. `error` is None
    if the service cancelled the job: its pages stay as they are.
    """

    outcome: JobOutcome
    error: PageError | None
    output: JobOutput | None = None
    repost: PostReason | None = None


@dataclass(frozen=True, slots=True)
class ForgetHint:
    """The id from a webhook is not this job's: forget it, then do `then` without a report."""

    then: KeepWaiting | JobEnded


@dataclass(frozen=True, slots=True)
class ServerMisconfigured:
    """RunPod refuses the key: record it for the server, then do `then`."""

    message: str
    then: KeepWaiting | JobEnded


PollOutcome = KeepWaiting | CancelJob | JobEnded | ForgetHint | ServerMisconfigured


def decide(job: PolledJob, report: PollReport, settings: RunPodOptions) -> PollOutcome:
    """Decide what to do with a job after a poll."""
    match report:
        case NoJobId():
            return _without_id(job, settings)
        case NoAnswer():
            return _without_answer(job, _next_poll(job, report, settings), settings)
        case KeyRefused():
            then = _without_answer(job, KeepWaiting(REFUSED_PAUSE), settings)
            return ServerMisconfigured(report.message, then)
        case UnknownJob() if job.remote_id is None:
            return ForgetHint(_without_id(job, settings))
        case UnknownJob():
            return _unknown(job, settings)
        case _ if job.remote_id is None and not _may_be_same_job(job, report):
            return ForgetHint(_without_id(job, settings))
        case _ if report.pending:
            return _pending(job, settings)
        case _:
            return _ended(job, report)


def poll_interval(age: float, settings: RunPodOptions) -> float:
    """Return the seconds until the next poll of a job of this age."""
    return min(settings.poll_max, max(settings.poll_min, age / _AGE_SHARE))


def _pending(job: PolledJob, settings: RunPodOptions) -> KeepWaiting | CancelJob | JobEnded:
    """A job that waits or runs: cancel it if that is wanted or if its ttl is near."""
    if job.left <= -settings.deadline_margin and (job.cancel_wanted or job.deadline_passed):
        return _unknown(job, settings)
    pause = poll_interval(job.age, settings)
    if job.cancel_wanted or job.left <= settings.deadline_margin:
        return CancelJob(pause, for_deadline=not job.cancel_wanted)
    return KeepWaiting(pause)


def _unknown(job: PolledJob, settings: RunPodOptions) -> KeepWaiting | JobEnded:
    """A 404, by the job's age: not yet visible, dropped by RunPod, or expired."""
    if job.cancel_wanted:
        return JobEnded(JobOutcome.CANCELLED, None)
    if job.deadline_passed:
        return _timed_out()
    if job.age < settings.visible_after:
        return KeepWaiting(poll_interval(job.age, settings))
    repost = _once(job, PostReason.EXPIRED)
    if job.left > 0:
        message = "RunPod no longer knows the job, although its time to live is not over."
        return JobEnded(JobOutcome.MISSING, RemoteResultMissing(message), repost=repost)
    return JobEnded(JobOutcome.EXPIRED, RemoteJobExpired(), repost=repost)


def _without_answer(
    job: PolledJob, wait: KeepWaiting, settings: RunPodOptions
) -> KeepWaiting | JobEnded:
    """No answer: wait for one, but not beyond the time at which RunPod has deleted the job."""
    return _unknown(job, settings) if job.left <= -settings.deadline_margin else wait


def _without_id(job: PolledJob, settings: RunPodOptions) -> KeepWaiting | JobEnded:
    """No id yet: after the ttl none will come."""
    if job.left <= 0:
        return _unknown(job, settings)
    return KeepWaiting(min(settings.poll_max, max(job.left, settings.poll_min)))


def _next_poll(job: PolledJob, silence: NoAnswer, settings: RunPodOptions) -> KeepWaiting:
    """Wait the job's interval, or longer if RunPod asks for it."""
    pause = poll_interval(job.age, settings)
    if silence.retry_after is None:
        return KeepWaiting(pause)
    return KeepWaiting(min(max(pause, silence.retry_after), LONGEST_RETRY_AFTER), jitter=True)


def _may_be_same_job(job: PolledJob, report: JobReport) -> bool:
    """Return False if the job that a webhook named has an output with another request key."""
    key = report.output.get("request_key") if isinstance(report.output, dict) else None
    return key is None or key == job.request_key


def _timed_out() -> JobEnded:
    """The deadline passed: the same job again would take as long."""
    return JobEnded(JobOutcome.TIMED_OUT, RemoteJobTimedOut())


def _once(job: PolledJob, reason: PostReason) -> PostReason | None:
    return None if job.reason is reason else reason


def _ended(job: PolledJob, report: JobReport) -> JobEnded:
    """A final status."""
    second = PostReason.SECOND_TRY
    completed = _completed(job, report) if report.status is JobStatus.COMPLETED else None
    if job.cancel_wanted and (completed is None or completed.output is None):
        return JobEnded(JobOutcome.CANCELLED, None)
    if completed is not None:
        return completed
    if job.deadline_passed:
        return _timed_out()
    if report.status is JobStatus.CANCELLED:
        return JobEnded(JobOutcome.CANCELLED, RemoteJobCancelled())
    if report.status is JobStatus.TIMED_OUT:
        return JobEnded(JobOutcome.TIMED_OUT, RemoteJobTimedOut(), repost=second)
    message = f"The job failed on RunPod: {report.error or 'RunPod gave no reason'}"
    return JobEnded(JobOutcome.FAILED, RemoteJobFailed(message), repost=second)


def _completed(job: PolledJob, report: JobReport) -> JobEnded:
    """COMPLETED alone proves nothing: the output must be there, valid and this job's."""
    missing = JobEnded(
        JobOutcome.MISSING,
        RemoteResultMissing(f"RunPod reports COMPLETED but {_instead_of_output(report)}."),
        repost=PostReason.SECOND_TRY,
    )
    try:
        output = JobOutput.model_validate(report.output)
    except ValidationError:
        return missing
    if output.request_key != job.request_key:
        return missing
    return JobEnded(
        JobOutcome.COMPLETED,
        RemoteResultMissing("The job's output does not contain the page."),
        output=output,
        repost=PostReason.SECOND_TRY,
    )


def _instead_of_output(report: JobReport) -> str:
    """Return what the answer has in place of a usable output, with the handler's own words."""
    output = report.output
    reason = report.error or (output.get("error") if isinstance(output, dict) else None)
    return (
        f"with an error: {' '.join(str(reason).split())[:_REASON_LETTERS]}"
        if reason
        else "returned no usable output"
    )


# Posts.

PostAnswer = str | NotAccepted | LostAnswer | EndpointRefused | BodyRefused


@dataclass(frozen=True, slots=True)
class JobAccepted:
    """RunPod made a job: keep its id."""

    remote_id: str


@dataclass(frozen=True, slots=True)
class PostAgain:
    """No job was made: send the same post again by the retry schedule.

    `probe_first`: the endpoint did not accept a connection; give up if it fails its probe.
    """

    message: str
    retry_after: float | None
    probe_first: bool


@dataclass(frozen=True, slots=True)
class AnswerLost:
    """A job may exist: keep the row as lost and post nothing more of this run for now.

    `again`: the post already repeated a lost one, so the endpoint counts as out for all runs.
    """

    message: str
    again: bool


@dataclass(frozen=True, slots=True)
class PostRefused:
    """RunPod refuses this body and would refuse it again: the pages fail."""

    message: str


@dataclass(frozen=True, slots=True)
class EndpointMisconfigured:
    """RunPod refuses the key or does not know the endpoint: the run waits as in an outage."""

    message: str


PostOutcome = JobAccepted | PostAgain | AnswerLost | PostRefused | EndpointMisconfigured


def decide_post(answer: PostAnswer, reason: PostReason) -> PostOutcome:
    """Decide what to do after a post: `answer` is RunPod's job id or the client's error.

    `reason`: why these pages were posted.
    """
    match answer:
        case str():
            return JobAccepted(answer)
        case NotAccepted():
            unreachable = isinstance(answer, Unreachable)
            return PostAgain(answer.message, answer.retry_after, probe_first=unreachable)
        case LostAnswer():
            return AnswerLost(answer.message, again=reason is PostReason.LOST_ANSWER)
        case BodyRefused():
            return PostRefused(answer.message)
        case EndpointRefused():
            return EndpointMisconfigured(answer.message)


def may_repost_lost(job: PolledJob, settings: RunPodOptions) -> bool:
    """Return whether the pages of a post whose answer was lost may be posted again.

    If the handler has a volume, two jobs of one request key do the work once. Without one, only
    after the first job's ttl: two handlers must never read the same page. A post that already
    repeated a lost one is not repeated: its webhook or the end of its ttl decides.
    """
    if job.hinted_id is not None or job.reason is PostReason.LOST_ANSWER:
        return False
    soon = settings.handler_volume and (job.lost_for or 0.0) >= settings.repost_after
    return soon or job.left <= 0
