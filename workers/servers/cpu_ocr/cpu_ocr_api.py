"""The CPU engine's OpenAI-compatible HTTP interface: chat, models, health, metrics."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rag_service.config.options import CpuOcrOptions
from rag_service.runtime.browser_refusal import BrowserRefusal
from workers.servers.cpu_ocr import chat_protocol, page_orientation, request_picture, text_order
from workers.servers.cpu_ocr.chat_protocol import ReadingRequest, RequestRefused
from workers.servers.cpu_ocr.ocr_engine import FasterPaddle, TextRecogniser, model_name
from workers.servers.cpu_ocr.ocr_queue import EngineNotReady, OcrQueue, ReadingAbandoned

log = logging.getLogger(__name__)

# The status that web servers log for a client that closed the connection; it is not received.
CLIENT_GONE = 499


def create_app(
    settings: CpuOcrOptions,
    engine: TextRecogniser | None = None,
    on_failure: Callable[[], None] | None = None,
) -> Starlette:
    """Return the server as an ASGI application; its OcrQueue is app.state.queue.

    The engine is loaded in the background when the application starts, unless one is given;
    on_failure is called if that fails, and the queue's `failure` is the error.
    """
    model = model_name(settings.engine)

    def load() -> TextRecogniser:
        return engine or FasterPaddle(settings.engine, settings.threads)

    queue = OcrQueue(model, load)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        loading = asyncio.create_task(queue.open())
        if on_failure:
            loading.add_done_callback(lambda _: on_failure() if queue.failure else None)
        yield
        await loading
        queue.close()

    app = Starlette(
        routes=_Service(settings, queue, model).routes(),
        exception_handlers={
            RequestRefused: _refused,
            HTTPException: _http_error,
            Exception: _unexpected_error,
        },
        middleware=[Middleware(BrowserRefusal)],
        lifespan=lifespan,
    )
    app.state.queue = queue
    return app


class _Service:
    """The four routes over one queue."""

    def __init__(self, settings: CpuOcrOptions, queue: OcrQueue, model: str) -> None:
        self._settings = settings
        self._queue = queue
        self._model = model
        self._started = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
        ]

    async def health(self, _: Request) -> Response:
        return Response(status_code=200 if self._queue.ready else 503)

    async def metrics(self, _: Request) -> Response:
        return Response(self._queue.metrics.exposition(), media_type="text/plain; version=0.0.4")

    async def models(self, _: Request) -> Response:
        card = {
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "rag_service",
            "max_model_len": chat_protocol.MAX_MODEL_LEN,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def chat(self, request: Request) -> Response:
        try:
            body = await _read(request, self._settings.max_body_bytes)
            job = chat_protocol.parse(body, self._model, self._settings.max_pixels)
            text, turned = await self._queue.run(
                lambda engine: _recognise(engine, job), _disconnected(request)
            )
        except (ReadingAbandoned, ClientDisconnect):
            self._queue.metrics.finished("abort")
            return Response(status_code=CLIENT_GONE)
        except EngineNotReady as error:
            raise RequestRefused(
                503, "The engine is loading or stopping.", "not_ready", "server_error"
            ) from error
        except request_picture.UnreadablePicture as error:
            raise RequestRefused(400, str(error), "invalid_image") from error
        except Exception as error:
            if not isinstance(error, RequestRefused):
                self._queue.metrics.finished("error")
            raise
        self._queue.metrics.page(turned)
        content, reason = chat_protocol.cut(text, job.max_tokens)
        self._queue.metrics.finished(reason)
        return JSONResponse(_completion(self._model, content, reason, job.prompt_tokens))


def _recognise(engine: TextRecogniser, job: ReadingRequest) -> tuple[str, int]:
    """Return the picture's text and the degrees by which it was turned. In the engine's thread."""
    page = page_orientation.read_page(engine, request_picture.plain(job.picture))
    return text_order.to_text(page.boxes), page.degrees


def _completion(
    model: str, content: str, reason: Literal["stop", "length"], prompt_tokens: int
) -> dict[str, Any]:
    tokens = chat_protocol.count_tokens(content)
    message = {"role": "assistant", "content": content}
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": prompt_tokens + tokens,
        },
    }


async def _read(request: Request, limit: int) -> bytes:
    """Return the body. Raises RequestRefused as soon as it exceeds the limit."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise RequestRefused(
                413, f"The request is larger than {limit} bytes.", "request_too_large"
            )
    return bytes(body)


async def _disconnected(request: Request) -> None:
    """Return when the client has closed its connection; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refused(_: Request, error: Exception) -> Response:
    if not isinstance(error, RequestRefused):
        raise error
    # The rest of a body that is too large is not read.
    headers = {"Connection": "close"} if error.status == 413 else None
    return JSONResponse(error.body(), error.status, headers)


async def _http_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    code = error.detail.lower().replace(" ", "_")
    return JSONResponse(
        RequestRefused(error.status_code, error.detail, code).body(), error.status_code
    )


async def _unexpected_error(_: Request, error: Exception) -> Response:
    log.error("A request failed inside the server.", exc_info=error)
    message = "The server failed on this request; its log has the details."
    return JSONResponse(RequestRefused(500, message, "internal", "server_error").body(), 500)
