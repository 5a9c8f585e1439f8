"""Progress of one document as server-sent events. Part of the API.

Counted from what is stored, so a stream that is opened anew after a restart goes on rightly.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial

import anyio
from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from rag_service.api.document_routes import DocumentId, require_document
from rag_service.api.problems import error_responses
from rag_service.api.query_parameters import KNOWN_PARAMETERS_ONLY
from rag_service.api.resources import Here, Services
from rag_service.errors import NotFound
from rag_service.knowledgebase.document_queries import get_document
from rag_service.knowledgebase.views import DocumentView
from rag_service.states import TERMINAL

router = APIRouter(tags=["documents"], dependencies=[KNOWN_PARAMETERS_ONLY])

_LOOK_SECONDS = 1.0
_HEARTBEAT_SECONDS = 15.0
# They change by themselves while nothing happens.
_CLOCKS = {"eta_seconds", "wait_seconds", "run_seconds"}


@router.get(
    "/documents/{document_id}/events",
    summary="Follow a document",
    response_class=StreamingResponse,
    responses={
        200: {
            "content": {"text/event-stream": {"example": "event: progress\ndata: {…}\n\n"}},
            "description": "Events until the newest run has ended.",
        },
        **error_responses(NotFound),
    },
)
async def events(document_id: DocumentId, here: Here) -> StreamingResponse:
    """Server-sent events: `progress` at once and whenever something has changed, `end` when the
    newest run has ended or the document was deleted, after which the stream closes.

    The data of both is the document as `GET /documents/{id}` gives it; `end` of a deleted
    document has none (`null`). A comment every 15 seconds keeps the connection open.
    """
    first = await anyio.to_thread.run_sync(require_document, document_id, here)
    return StreamingResponse(
        _follow(first, here),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _follow(document: DocumentView, here: Services) -> AsyncIterator[str]:
    look = partial(get_document, document.id, here.ocr_server)
    seen: DocumentView | None = None
    current: DocumentView | None = document
    spoken = time.monotonic()
    while current is not None and not here.stopping.is_set():
        if seen is None or _differs(seen, current):
            yield _event("progress", current)
            seen, spoken = current, time.monotonic()
        if current.latest_run.status in TERMINAL:
            break
        if time.monotonic() - spoken >= _HEARTBEAT_SECONDS:
            yield ": still here\n\n"
            spoken = time.monotonic()
        await asyncio.sleep(_LOOK_SECONDS)
        current = await anyio.to_thread.run_sync(look)
    if not here.stopping.is_set():
        yield _event("end", current)


def _differs(before: DocumentView, now: DocumentView) -> bool:
    return before.model_dump(exclude=_CLOCKS) != now.model_dump(exclude=_CLOCKS)


def _event(name: str, document: DocumentView | None) -> str:
    data = document.model_dump_json() if document else "null"
    return f"event: {name}\ndata: {data}\n\n"
