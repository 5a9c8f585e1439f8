"""The metrics route, and the middleware that counts requests."""

from __future__ import annotations

import time

from fastapi import APIRouter, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rag_service.api.resources import Resources
from rag_service.monitoring.metrics import Telemetry

router = APIRouter(tags=["health"])

# A made-up method must not become a time series.
_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "PUT", "PATCH", "OPTIONS"})
_OTHER = "other"


@router.get("/metrics", summary="Prometheus metrics", response_class=Response)
def metrics(resources: Resources) -> Response:
    """Return metrics of queues, documents, pages, jobs, workers, requests in Prometheus format."""
    return Response(resources.telemetry.exposition(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


class RequestMetrics:
    """Middleware: count every request by method, route and status, with its duration."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        status = 500

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else _OTHER
            seconds = time.monotonic() - started
            self._telemetry.answered(method, _route(scope), status, seconds)


def _route(scope: Scope) -> str:
    """Return the route's template, which contains no ids."""
    return getattr(scope.get("route"), "path", _OTHER)
