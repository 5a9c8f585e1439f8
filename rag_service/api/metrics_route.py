"""The metrics route, and what counts the requests. Part of the API."""

from __future__ import annotations

import time

from fastapi import APIRouter, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rag_service.api.resources import Here
from rag_service.monitoring.metrics import Telemetry

router = APIRouter(tags=["health"])

# Names that strangers make up must not become time series.
_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "PUT", "PATCH", "OPTIONS"})
_OTHER = "other"


@router.get("/metrics", summary="Prometheus metrics", response_class=Response)
def metrics(here: Here) -> Response:
    """Queues, documents, pages, jobs, workers and requests, in Prometheus's text format."""
    return Response(here.telemetry.exposition(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


class Measure:
    """Counts every request by method, route and status, with its duration."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else _OTHER
            seconds = time.monotonic() - began
            self._telemetry.answered(method, _route(scope), status, seconds)


def _route(scope: Scope) -> str:
    """The route's template, which has no ids in it."""
    return getattr(scope.get("route"), "path", _OTHER)
