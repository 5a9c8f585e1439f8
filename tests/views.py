"""Views of documents and pages for tests."""

from __future__ import annotations

from datetime import UTC, datetime

from rag_service.knowledgebase.views import CostView, DocumentView, PageCounts, PageView, RunView
from rag_service.states import PageState, RunState


def view(status: RunState = RunState.PROCESSED, **changes: object) -> DocumentView:
    """Return a document whose newest run is its current one, unless changed."""
    pages = PageCounts(total=4, done=3)
    run = RunView(id="r", status=status, error=None, pages=pages)
    fields: dict[str, object] = {
        "id": "d", "filename": "a.pdf", "collection": "default", "sha256": "0", "bytes": 1,
        "media_type": "application/pdf", "status": status, "incomplete": False, "latest_run": run,
        "waiting_for": None, "waiting_message": None, "queue_position": None,
        "parser": "glmocr", "ocr": "auto",
        "pages": pages, "eta_seconds": None, "error": None, "warnings": [], "cost": CostView(),
        "created_at": datetime(2026, 1, 2, tzinfo=UTC), "started_at": None, "finished_at": None,
        "wait_seconds": None, "run_seconds": None,
    }  # fmt: skip
    return DocumentView.model_validate(fields | changes)


def page_view(number: int = 1, markdown: str = "text", **changes: object) -> PageView:
    empty = ("parser", "parser_version", "engine", "model", "dpi", "finish_reason")
    fields: dict[str, object] = {
        "number": number, "plan": "native", "plan_reason": "", "status": PageState.NATIVE,
        "markdown": markdown, "width_pt": 1, "height_pt": 1, "prompt_tokens": None,
        "completion_tokens": None, "seconds": None, "reused": False, "error": None,
        "warnings": [], **dict.fromkeys(empty),
    }  # fmt: skip
    return PageView.model_validate(fields | changes)
