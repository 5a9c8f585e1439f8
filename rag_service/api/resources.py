"""What the routes of one API process share: settings, document store, renderer, limits."""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import Annotated

import anyio
from fastapi import Depends, Request

from rag_service.api.page_images import PageImageRenderer
from rag_service.config.options import Settings
from rag_service.database.engine import most_connections
from rag_service.documents.storage import DocumentStore
from rag_service.monitoring.metrics import Telemetry

# Uploads whose bytes arrive at the same time; later ones wait before their body is read.
_UPLOADS = 64
# Uploads that are being stored, each with a database connection in hand.
_COMMITS = 8


class Services:
    """Made once an application; the routes get it as a dependency."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.telemetry = Telemetry(settings)
        self.pictures = PageImageRenderer(settings)
        self.uploads = asyncio.Semaphore(_UPLOADS)
        # Set when the process is asked to stop: streams without an end of their own end.
        self.stopping = asyncio.Event()

    @cached_property
    def store(self) -> DocumentStore:
        """Opened on first use, and tried again after StorageUnavailable."""
        return DocumentStore(self.settings)

    @cached_property
    def commits(self) -> anyio.CapacityLimiter:
        return anyio.CapacityLimiter(_COMMITS)

    def limit_threads(self) -> None:
        """No more threads than database connections, so that none waits for a connection.

        Call it inside the event loop.
        """
        threads = anyio.to_thread.current_default_thread_limiter()
        threads.total_tokens = most_connections(self.settings) - _COMMITS

    @property
    def ocr_server(self) -> str | None:
        """The OCR server in use, as its record names it."""
        return self.settings.page_server


async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


Here = Annotated[Services, Depends(_services)]
