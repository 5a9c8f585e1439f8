"""Answers that come before the request's body has ended, delivered in spite of it. Used by app.

A server that closes while bytes still arrive resets the connection, and the client may never
see why it was refused (RFC 9112, section 9.6). So after such an answer what arrives is thrown
away for a short while, and then the connection closes.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LINGER_SECONDS = 5.0
# The rest of a body this small is read by the server itself, and the connection stays.
_SMALL_BODY = 65536


class EarlyResponse:
    """Closes connections whose request was answered early, but not in the client's face."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _may_be_large(Headers(scope=scope)):
            exchange = _Exchange(Headers(scope=scope), receive, send)
            await self._app(scope, exchange.receive, exchange.send)
        else:
            await self._app(scope, receive, send)


class _Exchange:
    """One request with a body of its own, and its answer."""

    def __init__(self, headers: Headers, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._ended = False
        # Who waits for "100 Continue" sends nothing until the body is asked for.
        self._arriving = headers.get("expect", "").lower() != "100-continue"

    async def receive(self) -> Message:
        self._arriving = True
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._ended = True
        return message

    async def send(self, message: Message) -> None:
        if not self._ended and message["type"] == "http.response.start":
            MutableHeaders(scope=message)["connection"] = "close"
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if last and not self._ended and self._arriving:
            await self._send({**message, "more_body": True})
            await self._discard()
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)

    async def _discard(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while not self._ended:
                    await self.receive()


def _may_be_large(headers: Headers) -> bool:
    length = headers.get("content-length", "")
    if length.isdecimal():
        return int(length) > _SMALL_BODY
    return "transfer-encoding" in headers
