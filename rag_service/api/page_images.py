"""Page images for viewers: one render child, with one open document at a time."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

from rag_service.config.options import Settings
from rag_service.documents.storage import DocumentStore
from rag_service.errors import NotFound
from rag_service.knowledgebase.document_queries import StoredSource
from rag_service.layout.page_layout import Bbox
from rag_service.pdf.session import PdfSession

# A viewer shows page after page, so the document stays open for this long after the last one.
_IDLE_SECONDS = 60.0


class PageImageRenderer:
    """Renders pages, one at a time. The child starts with the first page and ends when idle."""

    def __init__(self, settings: Settings) -> None:
        self._pdf = PdfSession(settings.pdf, settings.limits.max_pages)
        self._lock = asyncio.Lock()
        self._open_file = ExitStack()
        self._key: str | None = None
        self._pages = 0
        self._closing: asyncio.Task[None] | None = None

    async def render(
        self, store: DocumentStore, source: StoredSource, number: int, dpi: int, box: Bbox | None
    ) -> bytes:
        """Return page `number` (from 1), or the part of it in `box`, as a JPEG.

        Raises NotFound beyond the last page, SourceMissing, and what PdfSession.open and
        PdfSession.render raise.
        """
        async with self._lock:
            self._cancel_closing()
            try:
                if self._key != source.key:
                    await self._open(store, source)
                if not 1 <= number <= self._pages:
                    raise NotFound(f"No page {number}: the document has {self._pages} pages.")
                if box is None:
                    return (await self._pdf.render(number, dpi)).jpeg
                return (await self._pdf.unscaled_crop(number, dpi, box)).jpeg
            finally:
                self._closing = asyncio.create_task(self._close_when_idle())

    async def close(self) -> None:
        """Stop the render child."""
        self._cancel_closing()
        async with self._lock:
            await self._release()

    async def _open(self, store: DocumentStore, source: StoredSource) -> None:
        self._close_file()
        path = await asyncio.to_thread(self._open_file.enter_context, store.open_local(source.key))
        found = await self._pdf.open(path, source.media_type)
        self._key, self._pages = source.key, found.pages

    def _close_file(self) -> None:
        self._key = None
        self._open_file.close()

    async def _release(self) -> None:
        await self._pdf.close()
        self._close_file()

    def _cancel_closing(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None

    async def _close_when_idle(self) -> None:
        await asyncio.sleep(_IDLE_SECONDS)
        async with self._lock:
            self._closing = None
            await self._release()
