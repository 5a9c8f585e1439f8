"""The HTTP service: the application and its process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI

from rag_service import __version__
from rag_service.api import (
    auth,
    docs_page,
    document_routes,
    early_response,
    event_stream,
    head_requests,
    health_routes,
    metrics_route,
    openapi_document,
    page_routes,
    problems,
    remote_job_routes,
    reprocess_job_routes,
    reprocess_routes,
    server_routes,
    webhooks,
)
from rag_service.api.resources import ApiResources
from rag_service.config.options import Settings
from rag_service.runtime.http_server import HttpServer
from rag_service.runtime.log_format import configure_logging

log = logging.getLogger(__name__)

_STOP_SECONDS = 30
_DESCRIPTION = (
    "Turns PDFs and scans into pages of text: add a document, follow its progress, read its "
    "pages. If a key is set, every request needs it: `Authorization: Bearer KEY`; without it the "
    "answer is 401 `unauthorized`. If no key is set, only programs on this machine may ask; "
    "others get 403 `forbidden`. Errors are problem details (RFC 9457) with a stable `code`. A "
    "path without a route is 404 `not_found`; a method that a path does not take is 405 "
    "`method_not_allowed`, with the methods that it takes in `Allow`."
)
_PARTS = (
    document_routes, event_stream, page_routes, remote_job_routes, reprocess_routes,
    reprocess_job_routes, server_routes, health_routes, metrics_route, docs_page, webhooks,
)  # fmt: skip


def create_app(settings: Settings) -> FastAPI:
    """Return the application.

    Raises ConfigurationError if it would be open to other machines without a key.
    """
    auth.require_safe_binding(settings.api)
    app = FastAPI(
        title="rag_service",
        version=__version__,
        description=_DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan,
    )
    resources = ApiResources(settings)
    app.state.resources = resources
    for part in _PARTS:
        app.include_router(part.router)
    problems.install(app, (route for part in _PARTS for route in part.router.routes))
    openapi_document.install(app)
    # The last middleware added handles a request first.
    app.add_middleware(head_requests.HeadRequests)
    app.add_middleware(auth.AccessControl, api=settings.api)
    app.add_middleware(problems.CatchAll)
    app.add_middleware(early_response.EarlyResponse)
    app.add_middleware(metrics_route.RequestMetrics, telemetry=resources.telemetry)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    resources: ApiResources = app.state.resources
    resources.limit_threads()
    yield
    resources.feed.stop()
    await resources.page_images.close()


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Open requests are answered; event streams end.

    Raises ConfigurationError. Exits with status 3 if the address is in use.
    """
    configure_logging(settings)
    asyncio.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    app = create_app(settings)
    resources: ApiResources = app.state.resources
    config = uvicorn.Config(
        app,
        host=settings.api.host,
        port=settings.api.port,
        log_config=None,
        access_log=False,
        server_header=False,
        # No proxy is trusted to name the caller.
        proxy_headers=False,
        timeout_graceful_shutdown=_STOP_SECONDS,
    )
    await HttpServer(config, resources.feed.stop, second_forces=True).serve()
