"""The layout model's HTTP interface: layout, health, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from rag_service.config.options import LayoutOptions
from rag_service.layout.layout_client import Readiness
from rag_service.layout.layout_model import BadPicture, LayoutModel
from rag_service.layout.page_layout import PageLayout
from rag_service.runtime.browser_refusal import BrowserRefusal
from workers.servers.layout.layout_queue import (
    LayoutAbandoned,
    LayoutQueue,
    ModelFailed,
    ModelNotReady,
    QueueFull,
)

# The status that web servers log for a client that closed the connection; it is not received.
CLIENT_GONE = 499


class PictureTooLarge(Exception):
    """The request's body is larger than the limit."""


# The outcome of each error: its name in the metrics, its status, and its message.
_OUTCOMES: dict[type[Exception], tuple[str, int, str]] = {
    ModelNotReady: ("not_ready", 503, "The layout model is loading, or the server is stopping."),
    QueueFull: ("busy", 429, "Too many pictures are waiting."),
    PictureTooLarge: ("too_large", 413, "The picture is larger than layout.max_body_bytes."),
    BadPicture: ("bad_picture", 422, "bad_picture"),
    ModelFailed: ("failed", 500, "The layout model failed on the picture"),
    LayoutAbandoned: ("gone", CLIENT_GONE, ""),
    ClientDisconnect: ("gone", CLIENT_GONE, ""),
}


def create_app(
    settings: LayoutOptions,
    load: Callable[[], LayoutModel],
    on_failure: Callable[[], None] = lambda: None,
) -> Starlette:
    """Return the server as an ASGI application; its LayoutQueue is app.state.queue.

    The model is loaded in the background when the application starts; on_failure is called if
    that fails, and the queue's `failure` is the error.
    """
    queue = LayoutQueue(settings, load)
    service = _Service(settings, queue)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        loading = asyncio.create_task(queue.open())
        loading.add_done_callback(lambda _: on_failure() if queue.failure else None)
        yield
        await loading
        queue.close()

    app = Starlette(
        routes=[
            Route("/layout", service.layout, methods=["POST"]),
            Route("/health", service.health),
            Route("/metrics", service.metrics),
        ],
        middleware=[Middleware(BrowserRefusal)],
        lifespan=lifespan,
    )
    app.state.queue = queue
    return app


class _Service:
    """The three routes over one queue."""

    def __init__(self, settings: LayoutOptions, queue: LayoutQueue) -> None:
        self._settings = settings
        self._queue = queue

    async def health(self, _: Request) -> Response:
        ready = self._queue.ready
        message = "" if ready else _OUTCOMES[ModelNotReady][2]
        body = Readiness(ok=ready, model=self._settings.model, message=message)
        return JSONResponse(body.model_dump(), 200 if ready else 503)

    async def metrics(self, _: Request) -> Response:
        return Response(self._queue.metrics.exposition(), media_type="text/plain; version=0.0.4")

    async def layout(self, request: Request) -> Response:
        try:
            jpeg = await _read(request, self._settings.max_body_bytes)
            boxes = await self._queue.find(jpeg, request.is_disconnected)
        except tuple(_OUTCOMES) as error:
            outcome, status, message = _OUTCOMES[type(error)]
            self._queue.metrics.ended(outcome)
            reason = f"{message}: {error}" if str(error) else message
            return PlainTextResponse(reason, status)
        self._queue.metrics.ended("ok")
        return JSONResponse(asdict(PageLayout(tuple(boxes), self._settings.model)))


async def _read(request: Request, limit: int) -> bytes:
    """Return the body. Raises PictureTooLarge as soon as it exceeds the limit."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise PictureTooLarge
    return bytes(body)
