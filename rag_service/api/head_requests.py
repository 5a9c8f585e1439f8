"""HEAD for every path that takes GET: the same status and headers, without the body."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadRequests:
    """Middleware: answer HEAD with the head of the answer to GET.

    A body is not made further than its first piece, so that a stream of events ends at once.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        ended = False

        async def send_head(message: Message) -> None:
            nonlocal ended
            if message["type"] == "http.response.start":
                await send(message)
            elif not ended:
                ended = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        async def receive_until_sent() -> Message:
            return {"type": "http.disconnect"} if ended else await receive()

        await self._app({**scope, "method": "GET"}, receive_until_sent, send_head)
