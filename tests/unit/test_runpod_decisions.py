"""The decisions about remote jobs: each kind of answer at each age and state of a job."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_service.config.loader import load_settings
from rag_service.errors import (
    PageError,
    RemoteJobCancelled,
    RemoteJobExpired,
    RemoteJobFailed,
    RemoteJobTimedOut,
    RemoteResultMissing,
)
from rag_service.runpod.decisions import (
    REFUSED_PAUSE,
    AnswerLost,
    CancelJob,
    EndpointMisconfigured,
    ForgetHint,
    JobAccepted,
    JobEnded,
    KeepWaiting,
    KeyRefused,
    NoAnswer,
    NoJobId,
    PollOutcome,
    PollReport,
    PostAgain,
    PostRefused,
    ServerMisconfigured,
    UnknownJob,
    decide,
    decide_post,
    may_repost_lost,
    poll_interval,
)
from rag_service.runpod.job_keys import request_key
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

RUNPOD = load_settings().runpod


@dataclass(frozen=True)
class AJob:
    remote_id: str | None = "remote"
    hinted_id: str | None = None
    request_key: str = "run:options:pages"
    reason: PostReason = PostReason.FIRST
    cancel_wanted: bool = False
    deadline_passed: bool = False
    age: float = 100.0
    left: float = 80_000.0
    lost_for: float | None = None


def report(word: str, output: object = None, error: str | None = None) -> JobReport:
    status = JobStatus(word) if word in set(JobStatus) else None
    return JobReport(status, word, output, error, None, None)


def good_output(**changes: object) -> dict[str, object]:
    page = {"page": 1, "markdown": "text", "finish_reason": "stop"}
    return {"version": 1, "request_key": AJob.request_key, "pages": [page], **changes}


# States of a job with an id.
YOUNG = AJob(age=RUNPOD.visible_after - 1)
MIDDLE = AJob()
NEAR_TTL = AJob(age=86_000, left=RUNPOD.deadline_margin)
PAST_TTL = AJob(age=86_500, left=-1.0)
LONG_PAST = AJob(age=87_000, left=-RUNPOD.deadline_margin)
TIMED = replace(NEAR_TTL, deadline_passed=True)
TIMED_LONG_PAST = replace(LONG_PAST, deadline_passed=True)
CANCELLED = AJob(cancel_wanted=True)
CANCELLED_LONG_PAST = replace(LONG_PAST, cancel_wanted=True)
REPOSTED = AJob(reason=PostReason.EXPIRED)
REPOSTED_PAST_TTL = replace(PAST_TTL, reason=PostReason.EXPIRED)
# States of a job whose post has brought no id.
NO_ID = AJob(remote_id=None)
NO_ID_PAST_TTL = replace(PAST_TTL, remote_id=None)
NO_ID_CANCELLED_PAST_TTL = replace(PAST_TTL, remote_id=None, cancel_wanted=True)
HINTED = AJob(remote_id=None, hinted_id="named")
HINTED_PAST_TTL = replace(PAST_TTL, remote_id=None, hinted_id="named")

PENDING = [report(word) for word in ("IN_QUEUE", "IN_PROGRESS", "RUNNING", "A_NEW_WORD")]
DONE = report("COMPLETED", good_output())
EMPTY = report("COMPLETED")
FOREIGN = report("COMPLETED", good_output(request_key="another"))
FAILED, STOPPED, TIMED_OUT = report("FAILED"), report("CANCELLED"), report("TIMED_OUT")
SILENCE, SLOW_DOWN = NoAnswer("HTTP 502"), NoAnswer("HTTP 429", retry_after=100.0)
REFUSED = KeyRefused("HTTP 401")

SECOND, EXPIRED = PostReason.SECOND_TRY, PostReason.EXPIRED


def wait_for(job: AJob) -> str:
    return f"wait {poll_interval(job.age, RUNPOD):g}"


def ended(
    outcome: JobOutcome, error: type[PageError] | None = None, repost: PostReason | None = None
) -> str:
    again = f", repost {repost}" if repost else ""
    return f"{outcome}: {error.__name__ if error else 'pages kept'}{again}"


def in_words(outcome: PollOutcome) -> str:
    """An outcome as one line, without the sentences of its errors."""
    match outcome:
        case KeepWaiting():
            return f"wait {outcome.seconds:g}" + (" with jitter" if outcome.jitter else "")
        case CancelJob():
            return "cancel for " + ("the deadline" if outcome.for_deadline else "the run")
        case ForgetHint():
            return f"forget the hint, {in_words(outcome.then)}"
        case ServerMisconfigured():
            return f"misconfigured, {in_words(outcome.then)}"
        case JobEnded():
            error = type(outcome.error) if outcome.error else None
            return ended(outcome.outcome, error, outcome.repost)


CANCELLED_BY_US = ended(JobOutcome.CANCELLED)
DEADLINE = ended(JobOutcome.TIMED_OUT, RemoteJobTimedOut)
MISSING = ended(JobOutcome.MISSING, RemoteResultMissing, EXPIRED)
MISSING_AGAIN = ended(JobOutcome.MISSING, RemoteResultMissing)
NO_OUTPUT = ended(JobOutcome.MISSING, RemoteResultMissing, SECOND)
GONE = ended(JobOutcome.EXPIRED, RemoteJobExpired, EXPIRED)
GONE_AGAIN = ended(JobOutcome.EXPIRED, RemoteJobExpired)
COMPLETED = ended(JobOutcome.COMPLETED, RemoteResultMissing, SECOND)
CRASHED = ended(JobOutcome.FAILED, RemoteJobFailed, SECOND)
FOREIGN_CANCEL = ended(JobOutcome.CANCELLED, RemoteJobCancelled)
TOO_LONG = ended(JobOutcome.TIMED_OUT, RemoteJobTimedOut, SECOND)
REFUSED_WAIT = f"wait {REFUSED_PAUSE:g}"
NO_ID_WAIT = f"wait {RUNPOD.poll_max:g}"


@pytest.mark.parametrize(
    ("job", "answer", "outcome"),
    [
        # Not final: the job goes on until a cancel or its deadline.
        *[(YOUNG, pending, wait_for(YOUNG)) for pending in PENDING],
        *[(MIDDLE, pending, wait_for(MIDDLE)) for pending in PENDING],
        *[(NEAR_TTL, pending, "cancel for the deadline") for pending in PENDING],
        *[(PAST_TTL, pending, "cancel for the deadline") for pending in PENDING],
        *[(LONG_PAST, pending, "cancel for the deadline") for pending in PENDING],
        *[(TIMED, pending, "cancel for the deadline") for pending in PENDING],
        *[(TIMED_LONG_PAST, pending, DEADLINE) for pending in PENDING],
        *[(CANCELLED, pending, "cancel for the run") for pending in PENDING],
        *[(CANCELLED_LONG_PAST, pending, CANCELLED_BY_US) for pending in PENDING],
        *[(HINTED, pending, wait_for(HINTED)) for pending in PENDING],
        # Final: the job has ended at any age.
        *[(job, DONE, COMPLETED) for job in (YOUNG, MIDDLE, TIMED, CANCELLED, LONG_PAST, HINTED)],
        *[(job, EMPTY, NO_OUTPUT) for job in (YOUNG, MIDDLE, TIMED, LONG_PAST, HINTED)],
        (MIDDLE, FOREIGN, NO_OUTPUT),
        *[(job, FAILED, CRASHED) for job in (YOUNG, MIDDLE, LONG_PAST, HINTED)],
        *[(job, STOPPED, FOREIGN_CANCEL) for job in (YOUNG, MIDDLE, LONG_PAST, HINTED)],
        *[(job, TIMED_OUT, TOO_LONG) for job in (YOUNG, MIDDLE, LONG_PAST, HINTED)],
        *[(TIMED, final, DEADLINE) for final in (FAILED, STOPPED, TIMED_OUT)],
        *[(CANCELLED, final, CANCELLED_BY_US) for final in (EMPTY, FAILED, STOPPED, TIMED_OUT)],
        # 404: not yet visible, dropped, or expired.
        (YOUNG, UnknownJob(), wait_for(YOUNG)),
        (MIDDLE, UnknownJob(), MISSING),
        (REPOSTED, UnknownJob(), MISSING_AGAIN),
        (PAST_TTL, UnknownJob(), GONE),
        (REPOSTED_PAST_TTL, UnknownJob(), GONE_AGAIN),
        (TIMED, UnknownJob(), DEADLINE),
        (CANCELLED, UnknownJob(), CANCELLED_BY_US),
        (HINTED, UnknownJob(), f"forget the hint, {NO_ID_WAIT}"),
        (HINTED_PAST_TTL, UnknownJob(), f"forget the hint, {GONE}"),
        # No answer: wait, but not longer than the job can exist.
        *[(job, SILENCE, wait_for(job)) for job in (YOUNG, MIDDLE, NEAR_TTL, PAST_TTL, CANCELLED)],
        (MIDDLE, SLOW_DOWN, "wait 100 with jitter"),
        (MIDDLE, NoAnswer("HTTP 429", 1e9), f"wait {LONGEST_RETRY_AFTER:g} with jitter"),
        (LONG_PAST, SILENCE, GONE),
        (TIMED_LONG_PAST, SILENCE, DEADLINE),
        (CANCELLED_LONG_PAST, SLOW_DOWN, CANCELLED_BY_US),
        (HINTED, SILENCE, wait_for(HINTED)),
        # The key is refused: that is the server's fault, and not the job's.
        *[(job, REFUSED, f"misconfigured, {REFUSED_WAIT}") for job in (YOUNG, MIDDLE, PAST_TTL)],
        (LONG_PAST, REFUSED, f"misconfigured, {GONE}"),
        (HINTED, REFUSED, f"misconfigured, {REFUSED_WAIT}"),
        # No id: the post's answer may be lost.
        (NO_ID, NoJobId(), NO_ID_WAIT),
        (replace(NO_ID, left=0.01), NoJobId(), f"wait {RUNPOD.poll_min:g}"),
        (NO_ID_PAST_TTL, NoJobId(), GONE),
        (NO_ID_CANCELLED_PAST_TTL, NoJobId(), CANCELLED_BY_US),
        # A webhook named a job of another post.
        (HINTED, FOREIGN, f"forget the hint, {NO_ID_WAIT}"),
        (HINTED_PAST_TTL, FOREIGN, f"forget the hint, {GONE}"),
    ],
)
def test_each_answer_has_one_outcome(job: AJob, answer: PollReport, outcome: str) -> None:
    assert in_words(decide(job, answer, RUNPOD)) == outcome


@pytest.mark.parametrize(
    "output",
    [
        None,
        {},
        [],
        "text",
        {"version": 2},
        good_output(request_key="another"),
        good_output(pages="none"),
        {"version": 1, "request_key": AJob.request_key},
    ],
)
def test_completed_without_the_jobs_output_is_a_failure(output: object) -> None:
    outcome = decide(AJob(), report("COMPLETED", output), RUNPOD)
    assert in_words(outcome) == NO_OUTPUT


def test_the_error_of_a_failed_job_contains_runpods_message() -> None:
    outcome = decide(AJob(), report("FAILED", error="CUDA out of memory"), RUNPOD)
    assert isinstance(outcome, JobEnded)
    assert outcome.error is not None
    assert "CUDA out of memory" in outcome.error.message


# Every job and every answer.

JOBS = st.builds(
    AJob,
    remote_id=st.sampled_from(["remote", None]),
    hinted_id=st.sampled_from(["named", None]),
    reason=st.sampled_from(PostReason),
    cancel_wanted=st.booleans(),
    deadline_passed=st.booleans(),
    age=st.floats(0, 1e6),
    left=st.floats(-1e6, 1e6),
)
LIVE_REPORTS = st.sampled_from(PENDING)
FINAL_REPORTS = st.sampled_from([DONE, EMPTY, FOREIGN, FAILED, STOPPED, TIMED_OUT])
SILENT_REPORTS = st.sampled_from([SILENCE, SLOW_DOWN, REFUSED])
REPORTS = st.one_of(LIVE_REPORTS, FINAL_REPORTS, SILENT_REPORTS, st.just(UnknownJob()))


def answered(job: AJob, answer: PollReport) -> PollOutcome:
    """The outcome of the answer; a job without any id is not asked for."""
    asked = job.remote_id is not None or job.hinted_id is not None
    return decide(job, answer if asked else NoJobId(), RUNPOD)


def final_part(outcome: PollOutcome) -> KeepWaiting | CancelJob | JobEnded:
    return outcome.then if isinstance(outcome, ForgetHint | ServerMisconfigured) else outcome


@given(job=JOBS, answer=REPORTS)
def test_no_page_is_posted_again_while_its_job_may_be_live(job: AJob, answer: PollReport) -> None:
    """RunPod deletes a job at its ttl, so after it only silence or a 404 frees the pages."""
    then = final_part(answered(job, answer))
    if not isinstance(then, JobEnded) or then.repost is None:
        return
    final_answer = isinstance(answer, JobReport) and not answer.pending
    known_gone = isinstance(answer, UnknownJob) and job.age >= RUNPOD.visible_after
    assert job.left <= 0 or ((job.remote_id or job.hinted_id) and (final_answer or known_gone))


@given(job=JOBS, answer=LIVE_REPORTS)
def test_a_live_job_is_never_posted_again(job: AJob, answer: PollReport) -> None:
    with_id = replace(job, remote_id="remote")
    outcome = decide(with_id, answer, RUNPOD)
    assert not isinstance(outcome, JobEnded) or outcome.repost is None


@given(job=JOBS, answer=SILENT_REPORTS)
def test_silence_ends_no_job_before_its_ttl(job: AJob, answer: PollReport) -> None:
    if job.left > -RUNPOD.deadline_margin and job.remote_id is not None:
        assert isinstance(final_part(decide(job, answer, RUNPOD)), KeepWaiting)


@given(job=JOBS, answer=FINAL_REPORTS)
def test_a_final_status_ends_the_job(job: AJob, answer: PollReport) -> None:
    with_id = replace(job, remote_id="remote")
    assert isinstance(decide(with_id, answer, RUNPOD), JobEnded)


@given(job=JOBS, answer=st.one_of(LIVE_REPORTS, SILENT_REPORTS, st.just(UnknownJob())))
def test_a_job_that_was_lost_twice_is_not_posted_a_third_time(
    job: AJob, answer: PollReport
) -> None:
    """What expired or vanished is posted again with the reason `expired`, and that once."""
    then = final_part(answered(replace(job, reason=PostReason.EXPIRED), answer))
    assert not isinstance(then, JobEnded) or then.repost is None


@given(job=JOBS, answer=REPORTS)
def test_a_cancelled_run_posts_nothing_again(job: AJob, answer: PollReport) -> None:
    then = final_part(answered(replace(job, cancel_wanted=True), answer))
    assert isinstance(then, KeepWaiting | CancelJob) or (
        then.error is None or then.output is not None
    )


@given(job=JOBS, answer=st.one_of(LIVE_REPORTS, SILENT_REPORTS, st.just(UnknownJob())))
def test_a_job_past_its_deadline_is_not_posted_again(job: AJob, answer: PollReport) -> None:
    then = final_part(answered(replace(job, deadline_passed=True), answer))
    assert not isinstance(then, JobEnded) or then.repost is None


@given(job=JOBS, answer=REPORTS)
def test_no_job_is_polled_for_ever(job: AJob, answer: PollReport) -> None:
    """Long enough after the ttl, every answer ends the job or asks for its cancellation."""
    then = final_part(answered(job, answer))
    if job.left <= -RUNPOD.deadline_margin and job.age >= RUNPOD.visible_after:
        assert not isinstance(then, KeepWaiting)
    if isinstance(then, KeepWaiting | CancelJob):
        assert RUNPOD.poll_min <= then.seconds <= LONGEST_RETRY_AFTER


@given(job=JOBS, answer=REPORTS)
def test_only_an_unconfirmed_hint_is_forgotten(job: AJob, answer: PollReport) -> None:
    if isinstance(answered(job, answer), ForgetHint):
        assert job.remote_id is None
        assert job.hinted_id is not None


@given(st.floats(0, 1e7), st.floats(0, 1e7))
def test_the_poll_interval_grows_with_the_age(one: float, other: float) -> None:
    young, old = sorted([one, other])
    assert poll_interval(young, RUNPOD) <= poll_interval(old, RUNPOD)


# Posts.


@pytest.mark.parametrize("reason", PostReason)
def test_only_a_post_that_made_no_job_is_sent_again(reason: PostReason) -> None:
    assert decide_post("remote", reason) == JobAccepted("remote")
    assert decide_post(NotAccepted("HTTP 429", 7.0), reason) == PostAgain("HTTP 429", 7.0, False)
    assert decide_post(Unreachable("refused"), reason) == PostAgain("refused", None, True)
    assert decide_post(BodyRefused("HTTP 413"), reason) == PostRefused("HTTP 413")
    assert decide_post(EndpointRefused("HTTP 401"), reason) == EndpointMisconfigured("HTTP 401")
    park = reason is PostReason.LOST_ANSWER
    assert decide_post(LostAnswer("HTTP 502"), reason) == AnswerLost("HTTP 502", park)


LOST = AJob(remote_id=None, lost_for=RUNPOD.repost_after)


@pytest.mark.parametrize(
    ("job", "volume", "allowed"),
    [
        (LOST, True, True),
        (replace(LOST, lost_for=RUNPOD.repost_after - 1), True, False),
        (replace(LOST, lost_for=None), True, False),
        (replace(LOST, hinted_id="named"), True, False),
        (replace(LOST, hinted_id="named", left=-1.0), True, False),
        (LOST, False, False),
        (replace(LOST, left=0.0), False, True),
    ],
)
def test_a_lost_post_is_repeated_when_no_two_handlers_can_read_its_pages(
    job: AJob, volume: bool, allowed: bool
) -> None:
    settings = RUNPOD.model_copy(update={"handler_volume": volume})
    assert may_repost_lost(job, settings) is allowed


def test_a_request_key_names_run_options_and_pages() -> None:
    assert request_key("r", "o", [1, 2]) == request_key("r", "o", (1, 2))
    assert request_key("r", "o", [1, 2]) != request_key("r", "o", [12])
    assert request_key("r", "o", [1, 2]).startswith("r:o:")
