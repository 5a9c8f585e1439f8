"""Texts for the state of a document."""

import pytest

from rag_service.cli import field_text
from rag_service.knowledgebase.views import (
    ErrorView,
    PageCounts,
    RunView,
    WarningView,
)
from rag_service.states import RunState, WaitingFor
from tests.views import view


def test_a_newest_run_that_differs_is_named() -> None:
    run = RunView(id="r", status=RunState.FAILED, error=None, pages=PageCounts())
    assert field_text.state(view(latest_run=run)) == "processed (newest run: failed)"


def test_an_incomplete_document_is_marked() -> None:
    assert field_text.state(view(RunState.FAILED, incomplete=True)) == "failed (incomplete)"


@pytest.mark.parametrize("reason", list(WaitingFor))
def test_every_reason_to_wait_has_a_text_and_the_place(reason: WaitingFor) -> None:
    text = field_text.waiting(view(RunState.QUEUED, waiting_for=reason, queue_position=7))
    assert text.endswith(", place 7")
    assert len(text) > len(", place 7")


def test_progress_counts_pages_and_the_time_left() -> None:
    text = field_text.progress(view(RunState.OCR, eta_seconds=65))
    assert text == "ocr, page 3 of 4, 1 min 05 s left"


def test_progress_of_a_document_that_waits_for_the_server_says_what_is_wrong() -> None:
    waits = {"waiting_for": WaitingFor.OCR_SERVER, "waiting_message": "HTTP 401; check the key"}
    text = field_text.progress(view(RunState.READY, **waits))
    assert text.endswith("waiting: for the OCR server, which is out: HTTP 401; check the key")


def test_progress_of_a_failed_run_gives_its_error() -> None:
    error = ErrorView(code="empty_pdf", message="No pages.", retryable=False)
    run = RunView(id="r", status=RunState.FAILED, error=error, pages=PageCounts())
    assert (
        field_text.progress(view(RunState.FAILED, latest_run=run)) == "failed, empty_pdf: No pages."
    )


def test_a_document_that_is_redone_has_not_ended() -> None:
    run = RunView(id="r", status=RunState.OCR, error=None, pages=PageCounts())
    again = view(latest_run=run)
    assert not field_text.ended(again)
    assert not field_text.succeeded(again)


def test_warnings_are_counted_by_code() -> None:
    codes = ["page_truncated", "repaired_pdf", "page_truncated"]
    warnings = [WarningView(code=code, message="") for code in codes]
    assert field_text.warning_counts(warnings) == "page_truncated x2, repaired_pdf"


def test_documents_are_counted_by_status() -> None:
    views = [view(), view(), view(RunState.FAILED)]
    assert field_text.status_counts(views) == "3 documents: 2 processed, 1 failed"
    assert field_text.status_counts([]) == "0 documents"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (4.24, "4.2 s"), (60, "1 min 00 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert field_text.duration(seconds) == text


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([1, 2], "1-2"), ([9, 1, 3, 2], "1-3, 9"), ([1, 3, 5], "1, 3, 5")],
)
def test_consecutive_pages_are_a_range(numbers: list[int], text: str) -> None:
    assert field_text.page_ranges(numbers) == text


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        (PageCounts(), ""),
        (PageCounts(total=40, done=8, ocr=8), "8/40"),
        (PageCounts(total=1, done=1, failed=1), "0/1, 1 failed"),
        (PageCounts(total=4, done=3, ocr=1, no_text=1, failed=1), "2/4, 1 failed"),
    ],
)
def test_failed_pages_are_not_counted_as_read(counts: PageCounts, text: str) -> None:
    assert field_text.pages(counts) == text
