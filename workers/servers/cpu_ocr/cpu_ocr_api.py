"""The OpenAI-compatible HTTP face of the CPU engine: chat, models, health, metrics.

Used by cpu_ocr_server.
"""

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
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rag_service.config.options import CpuOcrOptions
from workers.servers.cpu_ocr import chat_protocol, page_orientation, request_picture, text_order
from workers.servers.cpu_ocr.chat_protocol import ReadingRequest, RequestRefused
from workers.servers.cpu_ocr.ocr_engine import FasterPaddle, TextRecogniser, model_name
from workers.servers.cpu_ocr.ocr_queue import EngineNotReady, OcrQueue, ReadingAbandoned

log = logging.getLogger(__name__)

# What web servers write in their logs for a client that hung up; nobody receives it.
CLIENT_GONE = 499


def create_app(
    settings: CpuOcrOptions,
    engine: TextRecogniser | None = None,
    on_failure: Callable[[], None] | None = None,
) -> Starlette:
    """The server as an ASGI application; its Desk is app.state.desk.

    The engine is loaded in the background once the application starts, unless one is given;
    on_failure is called when that fails, and the desk's `failure` says why.
    """
    model = model_name(settings.engine)

    def load() -> TextRecogniser:
        return engine or FasterPaddle(settings.engine, settings.threads)

    desk = OcrQueue(model, load)
    service = _Service(settings, desk, model)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        loading = asyncio.create_task(desk.open())
        if on_failure:
            loading.add_done_callback(lambda _: on_failure() if desk.failure else None)
        yield
        await loading
        desk.close()

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", service.chat, methods=["POST"]),
            Route("/v1/models", service.models),
            Route("/health", service.health),
            Route("/metrics", service.metrics),
        ],
        exception_handlers={
            RequestRefused: _refused,
            HTTPException: _http_error,
            Exception: _broken,
        },
        lifespan=lifespan,
    )
    app.state.desk = desk
    return app


class _Service:
    """The four routes over one desk."""

    def __init__(self, settings: CpuOcrOptions, desk: OcrQueue, model: str) -> None:
        self._settings = settings
        self._desk = desk
        self._model = model
        self._started = int(time.time())

    async def health(self, _: Request) -> Response:
        return Response(status_code=200 if self._desk.ready else 503)

    async def metrics(self, _: Request) -> Response:
        return Response(self._desk.metrics.exposition(), media_type="text/plain; version=0.0.4")

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
            text, turned = await self._desk.run(lambda e: _recognise(e, job), _hung_up(request))
        except (ReadingAbandoned, ClientDisconnect):
            self._desk.metrics.finished("abort")
            return Response(status_code=CLIENT_GONE)
        except EngineNotReady as error:
            raise RequestRefused(
                503, "The engine is loading or stopping.", "not_ready", "server_error"
            ) from error
        except request_picture.UnreadablePicture as error:
            raise RequestRefused(400, str(error), "invalid_image") from error
        except Exception as error:
            if not isinstance(error, RequestRefused):
                self._desk.metrics.finished("error")
            raise
        self._desk.metrics.page(turned)
        content, reason = chat_protocol.cut(text, job.max_tokens)
        self._desk.metrics.finished(reason)
        return JSONResponse(_completion(self._model, content, reason, job.prompt_tokens))


def _recognise(engine: TextRecogniser, job: ReadingRequest) -> tuple[str, int]:
    """In the engine's thread: pixels to text, and the turn that made them readable."""
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
    """The body, given up as soon as it is over the limit, whatever its header says."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise RequestRefused(
                413, f"The request is larger than {limit} bytes.", "request_too_large"
            )
    return bytes(body)


async def _hung_up(request: Request) -> None:
    """Ends when the client has closed its connection; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refused(_: Request, error: Exception) -> Response:
    if not isinstance(error, RequestRefused):
        raise error
    # What came of a refused body is not worth reading on for.
    headers = {"Connection": "close"} if error.status == 413 else None
    return JSONResponse(error.body(), error.status, headers)


async def _http_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    code = error.detail.lower().replace(" ", "_")
    return JSONResponse(
        RequestRefused(error.status_code, error.detail, code).body(), error.status_code
    )


async def _broken(_: Request, error: Exception) -> Response:
    log.error("A request failed inside the server", exc_info=error)
    message = "The server failed on this request; its log has the details."
    return JSONResponse(RequestRefused(500, message, "internal", "server_error").body(), 500)
