"""What the routes of one API process share: settings, document store, renderer, limits."""

from __future__ import annotations

import asyncio
from functools import cached_property, partial
from typing import Annotated

import anyio
from fastapi import Depends, Request

from rag_service.api.client_slots import ClientSlots
from rag_service.api.document_feed import DocumentFeed
from rag_service.api.page_images import PageImageRenderer
from rag_service.config.options import Settings
from rag_service.database.engine import most_connections
from rag_service.documents.storage import DocumentStore
from rag_service.errors import BacklogFull, Busy
from rag_service.knowledgebase.document_queries import get_documents
from rag_service.monitoring.metrics import Telemetry
from rag_service.monitoring.store_check import StoreCheck

# Each open upload has a parser, a file and up to 1 MiB of its body.
_UPLOADS, _UPLOADS_PER_CLIENT = 64, 48
# A client that gets no slot in this time is asked to come back, before its body is read.
_UPLOAD_WAIT_SECONDS = 10.0
# All streams share one reader, whose work grows with the documents that are followed.
_STREAMS, _STREAMS_PER_CLIENT = 256, 128
# Uploads that are stored at the same time; each uses a database connection.
_COMMITS = 8
_WEBHOOK_BODIES = 2


class ApiResources:
    """One object per application; routes get it as a dependency."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.telemetry = Telemetry(settings, lambda: self.store_check.incoming_if_reachable())
        self.page_images = PageImageRenderer(settings)
        self.upload_slots = ClientSlots(
            "uploads", BacklogFull, total=_UPLOADS, per_client=_UPLOADS_PER_CLIENT,
            wait_seconds=_UPLOAD_WAIT_SECONDS,
        )  # fmt: skip
        self.stream_slots = ClientSlots(
            "event streams", Busy, total=_STREAMS, per_client=_STREAMS_PER_CLIENT, wait_seconds=0.0
        )
        self.feed = DocumentFeed(partial(get_documents, server=self.ocr_server))
        # Bodies of webhooks that are in memory at the same time.
        self.webhook_bodies = asyncio.Semaphore(_WEBHOOK_BODIES)

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


def client_address(request: Request) -> str:
    """Return the address of the caller, or an empty text if it is not known."""
    return request.client.host if request.client else ""


Resources = Annotated[ApiResources, Depends(_resources)]
