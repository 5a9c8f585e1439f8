"""Results of a job's pages: read, posted again, or failed with which error."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_service.config.loader import load_settings
from rag_service.errors import RemoteJobFailed
from rag_service.jobs.remote_jobs import JobRow
from rag_service.parsers.contract import PageResult, PageWarning, Region
from rag_service.parsers.glmocr import VERSION
from rag_service.runpod.decisions import JobEnded, PollReport, UnknownJob, decide
from rag_service.runpod.job_format import JobOutput
from rag_service.runpod.runpod_client import JobReport, JobStatus
from rag_service.states import JobOutcome, JobState, PageState, PostReason
from workers.remote.page_results import page_results
from workers.runpod_handler.page_reading import as_output

RUNPOD = load_settings().runpod
REGION = {"index": 0, "label": "text", "bbox_2d": (1, 2, 3, 4), "content": "Some text."}


def job(*pages: int) -> JobRow:
    return JobRow(
        id="j", run_id="r", base_url="u", endpoint_id="e", remote_id="x", hinted_id=None,
        request_key="k", pages=pages, reason=PostReason.FIRST, state=JobState.LIVE,
        cancel_wanted=False, deadline_passed=False, age=1.0, left=100.0, lost_for=None,
    )  # fmt: skip


def ended(*pages: dict[str, Any], **more: Any) -> JobEnded:
    engine = {"name": "sglang", "model": "glm-ocr", "version": "0.5"}
    given = {"version": 1, "request_key": "k", "pages": pages, "engine": engine, **more}
    output = JobOutput.model_validate(given)
    return JobEnded(JobOutcome.COMPLETED, RemoteJobFailed(), output, PostReason.SECOND_TRY)


def only_page(**page: Any) -> Any:
    stored, reasons = page_results(job(1), ended({"page": 1, "markdown": "Text."} | page), {})
    assert reasons == {}
    return stored[0]


def test_a_read_page_is_stored_with_all_its_details() -> None:
    page = only_page(
        regions=[REGION], finish_reason="stop", tokens={"prompt": 7, "completion": 3},
        seconds=1.5, dpi=137.5, parser_version="2",
        warnings=[{"code": "resolution_capped", "message": "Drawn at 137 DPI."}],
    )  # fmt: skip
    assert (page.state, page.markdown, page.regions) == (PageState.OCR, "Text.", [REGION])
    assert page.warnings == [{"code": "resolution_capped", "message": "Drawn at 137 DPI."}]
    assert page.columns == {
        "finish_reason": "stop", "prompt_tokens": 7, "completion_tokens": 3, "seconds": 1.5,
        "dpi": 137.5, "parser_version": "2", "engine": "sglang", "model": "glm-ocr",
    }  # fmt: skip


def test_a_page_is_stored_as_the_handler_sent_it() -> None:
    region = Region(0, "doc_title", (90, 40, 910, 80), "# A \ud800 title")
    warning = PageWarning("page_truncated", "The region `doc_title` stops at the token limit.")
    result = PageResult(
        1, PageState.TRUNCATED, "# A title", [region], "length", dpi=137.5, warnings=[warning]
    )
    sent = as_output(result)
    page = only_page(**json.loads(sent.model_dump_json()))
    assert (page.state, page.warnings) == (PageState.TRUNCATED, [asdict(warning)])
    assert page.regions == [
        {
            "index": 0, "label": "doc_title", "bbox_2d": (90, 40, 910, 80),
            "content": "# A \ufffd title",
        }
    ]  # fmt: skip
    assert page.columns["dpi"] == 137.5
    assert page.columns["parser_version"] == VERSION


@pytest.mark.parametrize(
    ("warnings", "finish_reason", "state"),
    [
        (["repetition_cut"], "length", PageState.OCR),
        (["page_truncated"], "length", PageState.TRUNCATED),
        (["repetition_cut", "page_truncated"], "length", PageState.TRUNCATED),
        (["resolution_capped", "page_without_text"], "stop", PageState.NO_TEXT),
        ([], "length", PageState.TRUNCATED),
        ([], "stop", PageState.OCR),
    ],
)
def test_a_pages_state_follows_its_warnings(
    warnings: list[str], finish_reason: str, state: PageState
) -> None:
    sent = [{"code": code, "message": "A warning."} for code in warnings]
    page = only_page(finish_reason=finish_reason, warnings=sent)
    assert page.state is state
    assert bool(page.warnings) == (bool(sent) or finish_reason == "length")


def test_a_page_without_text_always_has_a_warning() -> None:
    page = only_page(markdown=" \n", finish_reason="stop")
    assert page.state is PageState.NO_TEXT
    assert [warning["code"] for warning in page.warnings] == ["page_without_text"]


@pytest.mark.parametrize(
    ("code", "called", "again"),
    [
        ("page_too_large", "page_too_large", False),
        ("page_timeout", "page_timeout", False),
        ("page_unrenderable", "page_unrenderable", False),
        ("ocr_failed", "ocr_failed", False),
        ("ocr_rejected", "ocr_rejected", False),
        ("ocr_empty", "ocr_empty", False),
        ("ocr_repetition", "ocr_repetition", False),
        ("layout_unavailable", "layout_unavailable", True),
        ("internal", "ocr_failed", True),
    ],
)
def test_a_page_fails_with_its_code_after_one_more_try_if_that_may_help(
    code: str, called: str, again: bool
) -> None:
    end = ended({"page": 1, "error": {"code": code, "message": "It failed."}})
    [page], reasons = page_results(job(1), end, {})
    assert reasons == ({1: PostReason.SECOND_TRY} if again else {})
    assert (page.error is None) == again
    [page], reasons = page_results(job(1), end, {1: {PostReason.SECOND_TRY}})
    assert (page.state, reasons, page.error.code) == (PageState.FAILED, {}, called)
    assert "It failed." in page.error.message


# Every sequence of losses and failures.

BAD_PAGE = {"page": 1, "error": {"code": "internal", "message": "It failed."}}
FAILURES: list[PollReport] = [
    UnknownJob(),
    *[
        JobReport(status, status, output, None, None, None)
        for status, output in [
            (JobStatus.FAILED, None),
            (JobStatus.TIMED_OUT, None),
            (JobStatus.COMPLETED, None),
            (JobStatus.COMPLETED, {"version": 1, "request_key": "k", "pages": []}),
            (JobStatus.COMPLETED, {"version": 1, "request_key": "k", "pages": [BAD_PAGE]}),
        ]
    ],
]


@given(
    reports=st.lists(st.sampled_from(FAILURES), max_size=12), left=st.sampled_from([-1.0, 100.0])
)
def test_a_page_is_posted_again_once_for_each_reason_at_most(
    reports: list[PollReport], left: float
) -> None:
    """For any sequence of losses and failures; after the last one the page has failed."""
    reason = PostReason.FIRST
    posts = Counter([reason])
    for report in reports:
        live = replace(job(1), reason=reason, age=100_000.0, left=left)
        outcome = decide(live, report, RUNPOD)
        assert isinstance(outcome, JobEnded)
        [page], reposts = page_results(live, outcome, {1: set(posts)})
        assert (page.error is None) == (1 in reposts)
        if 1 not in reposts:
            break
        reason = reposts[1]
        posts[reason] += 1
    assert max(posts.values()) == 1
    assert set(posts) <= {PostReason.FIRST, PostReason.SECOND_TRY, PostReason.EXPIRED}
