"""A document's Markdown: its head and its pages."""

import pytest

from rag_service.knowledgebase.document_markdown import document_head, page_section
from rag_service.knowledgebase.views import CostView, ErrorView, PageStatus
from rag_service.states import GOOD, PageState, RunState
from tests.views import page_view, view


@pytest.mark.parametrize(
    ("status", "code", "outcome"),
    [
        (RunState.PROCESSED, None, "processed"),
        (RunState.FAILED, "pages_failed", "failed, pages_failed"),
        (RunState.CANCELLED, "cancelled", "cancelled"),
    ],
)
def test_the_head_names_document_and_outcome(
    status: RunState, code: str | None, outcome: str
) -> None:
    error = code and ErrorView(code=code, message="", retryable=False)
    assert document_head(view(status, error=error)) == f"<!-- document: a.pdf, {outcome} -->\n\n"


def test_the_head_shows_the_cost_if_there_is_one() -> None:
    paid = view(cost=CostView(gpu_seconds=64.75, usd=0.0123))
    assert document_head(paid) == (
        "<!-- document: a.pdf, processed, at least $0.0123 (64.8 GPU s) -->\n\n"
    )
    assert "$" not in document_head(view(cost=CostView()))


def test_a_page_that_was_not_read_is_shown_as_such() -> None:
    page = page_view(2, "", status=PageStatus.NOT_READ)
    assert page_section(page) == "<!-- page 2: not read -->\n\n"


def test_pages_have_the_states_of_the_database_and_one_more() -> None:
    assert {str(status) for status in PageStatus} == {*map(str, PageState), "not_read"}
    assert {str(status) for status in PageStatus if status.is_good} == set(map(str, GOOD))
