"""What each answer of RunPod means for a job: every age, status and kind of post."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_service.config.loader import load_settings
from rag_service.errors import (
    RemoteJobCancelled,
    RemoteJobExpired,
    RemoteJobFailed,
    RemoteJobTimedOut,
    RemoteResultMissing,
)
from rag_service.runpod.job_rules import (
    CancelIt,
    Ended,
    Wait,
    judge,
    judge_unknown,
    poll_interval,
    request_key,
)
from rag_service.runpod.runpod_client import JobReport, JobStatus
from rag_service.states import JobOutcome, PostReason

RUNPOD = load_settings().runpod


@dataclass(frozen=True)
class AJob:
    request_key: str = "run:options:pages"
    reason: PostReason = PostReason.FIRST
    cancel_wanted: bool = False
    deadline_passed: bool = False
    age: float = 100.0
    left: float = 80_000.0


def report(word: str, output: object = None, error: str | None = None) -> JobReport:
    status = JobStatus(word) if word in set(JobStatus) else None
    return JobReport(status, word, output, error, None, None)


def good_output(**changes: object) -> dict[str, object]:
    page = {"page": 1, "markdown": "text", "finish_reason": "stop"}
    return {"version": 1, "request_key": AJob.request_key, "pages": [page], **changes}


@pytest.mark.parametrize("word", ["IN_QUEUE", "IN_PROGRESS", "RUNNING", "A_NEW_WORD"])
def test_anything_not_final_is_pending(word: str) -> None:
    assert isinstance(judge(AJob(), report(word), RUNPOD), Wait)


@pytest.mark.parametrize("word", ["IN_QUEUE", "IN_PROGRESS", "A_NEW_WORD"])
def test_the_deadline_comes_before_the_ttl(word: str) -> None:
    late = AJob(left=RUNPOD.deadline_margin)
    assert isinstance(judge(late, report(word), RUNPOD), CancelIt)


def test_a_cancelled_run_has_its_job_cancelled() -> None:
    assert isinstance(judge(AJob(cancel_wanted=True), report("IN_PROGRESS"), RUNPOD), CancelIt)


@pytest.mark.parametrize("word", ["CANCELLED", "FAILED", "TIMED_OUT", "COMPLETED", None])
@pytest.mark.parametrize("passed", [True, False])
def test_a_job_that_we_cancelled_is_no_failure_of_its_pages(word: str | None, passed: bool) -> None:
    """Whatever RunPod then says of it, and whether it still knows it."""
    job = AJob(cancel_wanted=True, deadline_passed=passed)
    verdict = judge_unknown(job, RUNPOD) if word is None else judge(job, report(word), RUNPOD)
    assert verdict == Ended(JobOutcome.CANCELLED, None)


def test_a_result_that_came_before_a_cancel_is_taken() -> None:
    ended = judge(AJob(cancel_wanted=True), report("COMPLETED", good_output()), RUNPOD)
    assert isinstance(ended, Ended)
    assert ended.output is not None


@pytest.mark.parametrize("word", ["CANCELLED", "IN_PROGRESS"])
def test_after_the_deadline_the_pages_time_out_and_are_not_posted_again(word: str) -> None:
    job = AJob(deadline_passed=True, left=-RUNPOD.deadline_margin)
    ended = judge(job, report(word), RUNPOD)
    assert isinstance(ended, Ended)
    assert isinstance(ended.error, RemoteJobTimedOut)
    assert ended.repost is None


def test_a_result_that_came_before_our_cancel_is_taken() -> None:
    job = AJob(deadline_passed=True, left=10)
    ended = judge(job, report("COMPLETED", good_output()), RUNPOD)
    assert isinstance(ended, Ended)
    assert ended.output is not None


def test_somebody_elses_cancel_is_not_undone() -> None:
    ended = judge(AJob(), report("CANCELLED"), RUNPOD)
    assert isinstance(ended, Ended)
    assert isinstance(ended.error, RemoteJobCancelled)
    assert ended.repost is None


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
def test_completed_without_our_output_is_a_failure(output: object) -> None:
    ended = judge(AJob(), report("COMPLETED", output), RUNPOD)
    assert isinstance(ended, Ended)
    assert ended.outcome is JobOutcome.MISSING
    assert isinstance(ended.error, RemoteResultMissing)
    assert ended.repost is PostReason.SECOND_TRY


def test_a_failure_says_what_runpod_says() -> None:
    ended = judge(AJob(), report("FAILED", error="CUDA out of memory"), RUNPOD)
    assert isinstance(ended, Ended)
    assert isinstance(ended.error, RemoteJobFailed)
    assert "CUDA out of memory" in ended.error.message


def test_a_fresh_404_is_not_yet_visible() -> None:
    young = AJob(age=RUNPOD.visible_after - 1)
    assert isinstance(judge_unknown(young, RUNPOD), Wait)


@pytest.mark.parametrize(
    ("left", "error"), [(1000.0, RemoteResultMissing), (-1.0, RemoteJobExpired)]
)
def test_an_old_404_is_posted_again_once(left: float, error: type[Exception]) -> None:
    job = AJob(age=90_000, left=left)
    first = judge_unknown(job, RUNPOD)
    again = judge_unknown(replace(job, reason=PostReason.EXPIRED), RUNPOD)
    assert isinstance(first, Ended)
    assert isinstance(again, Ended)
    assert first.repost is PostReason.EXPIRED
    assert again.repost is None
    assert isinstance(again.error, error)


@given(
    age=st.floats(0, 1e6),
    left=st.floats(-1e6, 1e6),
    reason=st.sampled_from(PostReason),
    cancel=st.booleans(),
    passed=st.booleans(),
    word=st.sampled_from([*JobStatus, "NEW", None]),
)
def test_no_job_is_pending_for_ever(
    age: float, left: float, reason: PostReason, cancel: bool, passed: bool, word: str | None
) -> None:
    """Far enough past its ttl, with the cancel sent, every answer ends the job or cancels it."""
    job = AJob(reason=reason, cancel_wanted=cancel, deadline_passed=passed, age=age, left=left)
    verdict = judge_unknown(job, RUNPOD) if word is None else judge(job, report(word), RUNPOD)
    over = left <= -RUNPOD.deadline_margin and age >= RUNPOD.visible_after
    if over:
        assert not isinstance(verdict, Wait)
    if isinstance(verdict, Wait):
        assert RUNPOD.poll_min <= verdict.seconds <= RUNPOD.poll_max
    if isinstance(verdict, Ended) and cancel and word is None:
        assert verdict.repost is None


@given(st.floats(0, 1e7), st.floats(0, 1e7))
def test_polls_come_further_apart_with_age(one: float, other: float) -> None:
    young, old = sorted([one, other])
    assert poll_interval(young, RUNPOD) <= poll_interval(old, RUNPOD)


def test_a_request_key_names_run_options_and_pages() -> None:
    assert request_key("r", "o", [1, 2]) == request_key("r", "o", (1, 2))
    assert request_key("r", "o", [1, 2]) != request_key("r", "o", [12])
    assert request_key("r", "o", [1, 2]).startswith("r:o:")
