"""A document as one Markdown text, each page after a comment naming it. Used by CLI and API."""

from __future__ import annotations

from rag_service.knowledgebase.views import (
    CostView,
    DocumentView,
    ErrorView,
    PageStatus,
    PageView,
)


def document_head(document: DocumentView) -> str:
    """`<!-- document: agreement.pdf, processed -->`, for where several stand in a row.

    With what its jobs have cost, where it had any.
    """
    parts = [_in_comment(document.filename), outcome_of(document.status, document.error)]
    if cost := cost_of(document.cost):
        parts.append(cost)
    return f"<!-- document: {', '.join(parts)} -->\n\n"


def cost_of(cost: CostView) -> str:
    """`at least $0.0123 (64.8 GPU s)`; empty where nothing was paid by the second."""
    if cost.usd is None or cost.gpu_seconds is None:
        return ""
    return f"at least ${cost.usd:.4f} ({cost.gpu_seconds:.1f} GPU s)"


def page_section(page: PageView) -> str:
    """The page's text under `<!-- page N -->`, or why it has none in that comment."""
    if page.status.is_good and page.markdown.strip():
        return f"<!-- page {page.number} -->\n\n{page.markdown.strip()}\n\n"
    return f"<!-- page {page.number}: {outcome_of(page.status, page.error)} -->\n\n"


def outcome_of(status: str, error: ErrorView | None) -> str:
    """`failed, page_timeout`; `cancelled`, whose code is the same word, once."""
    word = "not read" if status == PageStatus.NOT_READ else str(status)
    return f"{word}, {error.code}" if error and error.code != status else word


def _in_comment(text: str) -> str:
    """Text that cannot end the comment that it stands in."""
    return " ".join(text.split()).replace("--", "- -").replace(">", "›")
