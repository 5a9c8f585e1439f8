"""Middleware of servers for programs alone: a request that a web page made is refused.

A page of any origin may make a browser post to this machine; the browser then sends an Origin.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class BrowserRefusal:
    """Answer 403 to every request with an Origin, before its body is read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and "origin" in Headers(scope=scope):
            refusal = PlainTextResponse("This server is not for web pages.\n", 403)
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)
