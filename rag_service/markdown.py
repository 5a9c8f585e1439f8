"""A document as one Markdown text, each page after a comment naming it. Used by CLI and API."""

from __future__ import annotations

from rag_service.knowledgebase.views import DocumentView, ErrorView, PageView
from rag_service.states import GOOD


def document_head(document: DocumentView) -> str:
    """`<!-- document: agreement.pdf, processed -->`, for where several stand in a row."""
    outcome = outcome_of(document.status, document.error)
    return f"<!-- document: {_in_comment(document.filename)}, {outcome} -->\n\n"


def page_section(page: PageView) -> str:
    """The page's text under `<!-- page N -->`, or why it has none in that comment."""
    if page.status in GOOD and page.markdown.strip():
        return f"<!-- page {page.number} -->\n\n{page.markdown.strip()}\n\n"
    return f"<!-- page {page.number}: {outcome_of(page.status, page.error)} -->\n\n"


def outcome_of(status: str, error: ErrorView | None) -> str:
    """`failed, page_timeout`; `cancelled`, whose code is the same word, once."""
    return f"{status}, {error.code}" if error and error.code != status else str(status)


def _in_comment(text: str) -> str:
    """Text that cannot end the comment that it stands in."""
    return " ".join(text.split()).replace("--", "- -").replace(">", "›")
