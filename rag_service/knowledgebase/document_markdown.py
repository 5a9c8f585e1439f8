"""A document as one Markdown text with a comment before each page."""

from __future__ import annotations

from rag_service.knowledgebase.views import (
    CostView,
    DocumentView,
    ErrorView,
    PageStatus,
    PageView,
)


def document_head(document: DocumentView) -> str:
    """Return `<!-- document: agreement.pdf, processed -->`, with the cost of its jobs if any."""
    parts = [_in_comment(document.filename), outcome_of(document.status, document.error)]
    if cost := cost_of(document.cost):
        parts.append(cost)
    return f"<!-- document: {', '.join(parts)} -->\n\n"


def cost_of(cost: CostView) -> str:
    """Return `at least $0.0123 (64.8 GPU s)`, or an empty string if there were no paid jobs."""
    if cost.usd is None or cost.gpu_seconds is None:
        return ""
    return f"at least ${cost.usd:.4f} ({cost.gpu_seconds:.1f} GPU s)"


def page_section(page: PageView) -> str:
    """Return the page's text under `<!-- page N -->`, or a comment that says why it has none."""
    if page.status.is_good and page.markdown.strip():
        return f"<!-- page {page.number} -->\n\n{page.markdown.strip()}\n\n"
    return f"<!-- page {page.number}: {outcome_of(page.status, page.error)} -->\n\n"


def outcome_of(status: str, error: ErrorView | None) -> str:
    """Return status and error code (`failed, page_timeout`), once if they are equal."""
    word = "not read" if status == PageStatus.NOT_READ else str(status)
    return f"{word}, {error.code}" if error and error.code != status else word


def _in_comment(text: str) -> str:
    """Return the text changed so that it cannot end its comment."""
    return " ".join(text.split()).replace("--", "- -").replace(">", "›")
