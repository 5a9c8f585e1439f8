"""The progress of one document as server-sent events.

Events are computed from stored rows, so a client can reconnect after a restart of the service.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rag_service.api.document_feed import DocumentVersion, Follower
from rag_service.api.document_routes import DocumentId, no_such_document
from rag_service.api.problems import error_responses
from rag_service.api.query_parameters import KNOWN_PARAMETERS_ONLY
from rag_service.api.resources import Resources, client_address
from rag_service.errors import Busy, NotFound

router = APIRouter(tags=["documents"], dependencies=[KNOWN_PARAMETERS_ONLY])

_HEARTBEAT_SECONDS = 15.0
# The first read may wait for a database connection.
_FIRST_SECONDS = 60.0


@router.get(
    "/documents/{document_id}/events",
    summary="Follow a document",
    response_class=StreamingResponse,
    responses={
        200: {
            "content": {"text/event-stream": {"example": "event: progress\ndata: {…}\n\n"}},
            "description": "Events until the newest run has ended.",
        },
        **error_responses(NotFound, Busy),
    },
)
async def events(
    document_id: DocumentId, request: Request, resources: Resources
) -> StreamingResponse:
    """Send server-sent events: `progress` at once and after every change; `end` when the newest
    run has ended or the document was deleted. Then the stream closes.

    The data of both is the document as in `GET /documents/{id}`, or `null` if it was deleted. A
    comment every 15 seconds keeps the connection open. The number of open streams is limited.
    """
    async with AsyncExitStack() as opening:
        await opening.enter_async_context(resources.stream_slots.slot(client_address(request)))
        follower = resources.feed.follow(document_id)
        opening.callback(resources.feed.leave, follower)
        first = await follower.next(_FIRST_SECONDS)
        if first is None:
            raise Busy("The document could not be read in time; try again later.")
        if first.view is None:
            raise no_such_document(document_id)
        return _EventStream(_follow(first, follower), opening.pop_all())


class _EventStream(StreamingResponse):
    """A stream that leaves the feed and its slot when it ends, even if it was never sent."""

    def __init__(self, stream: AsyncIterator[str], opened: AsyncExitStack) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(stream, media_type="text/event-stream", headers=headers)
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._opened:
            await super().__call__(scope, receive, send)


async def _follow(version: DocumentVersion, follower: Follower) -> AsyncIterator[str]:
    sent = version
    yield _event("progress", version)
    while not (version.has_ended or follower.is_closed):
        newer = await follower.next(_HEARTBEAT_SECONDS)
        if newer is None:
            if not follower.is_closed:
                yield ": still here\n\n"
            continue
        version = newer
        if version.view is not None and version.without_clocks != sent.without_clocks:
            yield _event("progress", version)
            sent = version
    if version.has_ended:
        yield _event("end", version)


def _event(name: str, version: DocumentVersion) -> str:
    return f"event: {name}\ndata: {version.json}\n\n"
