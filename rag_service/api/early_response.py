"""Early responses: answers that are sent before the request's body has ended.

A server that closes a connection while bytes arrive resets it, and the client may never see the
answer (RFC 9112, section 9.6). So after an early response the rest of the body is read and
discarded for a few seconds; then the connection is closed.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_DISCARD_SECONDS = 5.0
# uvicorn reads the rest of a body this small itself and keeps the connection open.
_SMALL_BODY = 65536


class EarlyResponse:
    """Middleware: close a connection after an early response, but only once it can be read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _may_be_large(Headers(scope=scope)):
            exchange = _Exchange(Headers(scope=scope), receive, send)
            await self._app(scope, exchange.receive, exchange.send)
        else:
            await self._app(scope, receive, send)


class _Exchange:
    """One request with a body, and its response."""

    def __init__(self, headers: Headers, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._ended = False
        # A client that expects "100 Continue" sends nothing before the body is read.
        self._body_expected = headers.get("expect", "").lower() != "100-continue"

    async def receive(self) -> Message:
        self._body_expected = True
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._ended = True
        return message

    async def send(self, message: Message) -> None:
        if not self._ended and message["type"] == "http.response.start":
            MutableHeaders(scope=message)["connection"] = "close"
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if last and not self._ended and self._body_expected:
            await self._send({**message, "more_body": True})
            await self._discard()
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)

    async def _discard(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_SECONDS):
                while not self._ended:
                    await self.receive()


def _may_be_large(headers: Headers) -> bool:
    length = headers.get("content-length", "")
    if length.isdecimal():
        return int(length) > _SMALL_BODY
    return "transfer-encoding" in headers
