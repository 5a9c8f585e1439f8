"""The progress of one document as server-sent events.

Events are computed from stored rows, so a client can reconnect after a restart of the service.
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
from rag_service.api.resources import ApiResources, Resources
from rag_service.errors import NotFound
from rag_service.knowledgebase.document_queries import get_document
from rag_service.knowledgebase.views import DocumentView
from rag_service.states import TERMINAL

router = APIRouter(tags=["documents"], dependencies=[KNOWN_PARAMETERS_ONLY])

_POLL_SECONDS = 1.0
_HEARTBEAT_SECONDS = 15.0
# They change with time, so a change of these alone is no event.
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
async def events(document_id: DocumentId, resources: Resources) -> StreamingResponse:
    """Send server-sent events: `progress` at once and after every change; `end` when the newest
    run has ended or the document was deleted. Then the stream closes.

    The data of both is the document as in `GET /documents/{id}`, or `null` if it was deleted. A
    comment every 15 seconds keeps the connection open.
    """
    first = await anyio.to_thread.run_sync(require_document, document_id, resources)
    return StreamingResponse(
        _follow(first, resources),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _follow(document: DocumentView, resources: ApiResources) -> AsyncIterator[str]:
    read = partial(get_document, document.id, resources.ocr_server)
    sent: DocumentView | None = None
    current: DocumentView | None = document
    sent_at = time.monotonic()
    while current is not None and not resources.stopping.is_set():
        if sent is None or _differs(sent, current):
            yield _event("progress", current)
            sent, sent_at = current, time.monotonic()
        if current.latest_run.status in TERMINAL:
            break
        if time.monotonic() - sent_at >= _HEARTBEAT_SECONDS:
            yield ": still here\n\n"
            sent_at = time.monotonic()
        await asyncio.sleep(_POLL_SECONDS)
        current = await anyio.to_thread.run_sync(read)
    if not resources.stopping.is_set():
        yield _event("end", current)


def _differs(before: DocumentView, now: DocumentView) -> bool:
    return before.model_dump(exclude=_CLOCKS) != now.model_dump(exclude=_CLOCKS)


def _event(name: str, document: DocumentView | None) -> str:
    data = document.model_dump_json() if document else "null"
    return f"event: {name}\ndata: {data}\n\n"
