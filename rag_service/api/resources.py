"""What the routes of one API process share: settings, document store, renderer, limits."""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import Annotated

import anyio
from fastapi import Depends, Request

from rag_service.api.page_images import PageImageRenderer
from rag_service.api.upload_slots import UploadSlots
from rag_service.config.options import Settings
from rag_service.database.engine import most_connections
from rag_service.documents.storage import DocumentStore
from rag_service.monitoring.metrics import Telemetry
from rag_service.monitoring.store_check import StoreCheck

# Uploads that are stored at the same time; each uses a database connection.
_COMMITS = 8
_WEBHOOK_BODIES = 2


class ApiResources:
    """One object per application; routes get it as a dependency."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.telemetry = Telemetry(settings, lambda: self.store_check.incoming_if_reachable())
        self.page_images = PageImageRenderer(settings)
        self.upload_slots = UploadSlots()
        # Bodies of webhooks that are in memory at the same time.
        self.webhook_bodies = asyncio.Semaphore(_WEBHOOK_BODIES)
        # Set when the process is asked to stop: event streams end then.
        self.stopping = asyncio.Event()

    @cached_property
    def store(self) -> DocumentStore:
        """The document store, opened on first use."""
        return DocumentStore(self.settings)

    @cached_property
    def store_check(self) -> StoreCheck:
        return StoreCheck(self.store)

    @cached_property
    def commit_limiter(self) -> anyio.CapacityLimiter:
        return anyio.CapacityLimiter(_COMMITS)

    def limit_threads(self) -> None:
        """Limit the threads to the database connections, so that no thread waits for one.

        Call it inside the event loop.
        """
        threads = anyio.to_thread.current_default_thread_limiter()
        threads.total_tokens = most_connections(self.settings) - _COMMITS

    @property
    def ocr_server(self) -> str | None:
        """The URL of the OCR server in use, as stored in its row; None if none is set."""
        return self.settings.page_server


async def _resources(request: Request) -> ApiResources:
    resources: ApiResources = request.app.state.resources
    return resources


Resources = Annotated[ApiResources, Depends(_resources)]
