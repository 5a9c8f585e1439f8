"""A document's Markdown says once what came of it."""

import pytest

from rag_service.knowledgebase.views import ErrorView
from rag_service.markdown import document_head
from rag_service.states import RunState
from tests.views import view


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
