"""Page images for viewers: a few render children, each with one open document at a time.

A document is drawn by one child at a time, and documents that were slow share one child, so bad
pages delay their own document. A caller waits for a bounded time, and only some may wait.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

from rag_service.api.slow_pages import SlowPages
from rag_service.config.options import Settings
from rag_service.documents.storage import DocumentStore
from rag_service.errors import Busy, NotFound, PageTimeout
from rag_service.knowledgebase.document_queries import StoredSource
from rag_service.layout.page_layout import Bbox
from rag_service.pdf.session import PdfSession

# A viewer shows page after page, so the document stays open for this long after the last one.
_IDLE_SECONDS = 60.0
MOST_CHILDREN = 3
# A viewer does not wait as long as a worker (pdf.page_time_limit): opening and drawing together.
_DRAW_SECONDS = 20.0
_WAIT_SECONDS = 10.0
_MOST_WAITING = 32


class PageImageRenderer:
    """Renders pages. Children start when they are needed and end when they are idle."""

    def __init__(self, settings: Settings) -> None:
        self._children = [_Child(settings) for _ in range(MOST_CHILDREN)]
        self._slow = SlowPages()
        self._draw_seconds = min(_DRAW_SECONDS, settings.pdf.page_time_limit)
        self._freed = asyncio.Event()
        self._waiting = 0

    async def render(
        self, store: DocumentStore, source: StoredSource, number: int, dpi: int, box: Bbox | None
    ) -> bytes:
        """Return page `number` (from 1), or the part of it in `box`, as a JPEG.

        Raises Busy, PageTimeout, NotFound beyond the last page, SourceMissing, and what
        PdfSession.open and PdfSession.render raise.
        """
        self._require_quick(source, number)
        child = await self._wait_for_child(source.key)
        try:
            # Callers may have waited behind the same page.
            self._require_quick(source, number)
            await child.fetch(store, source)
            jpeg = await self._draw(child, source, number, dpi, box)
        finally:
            child.release()
            self._freed.set()
            self._freed = asyncio.Event()
        return jpeg

    async def close(self) -> None:
        """Stop the render children."""
        for child in self._children:
            await child.close()

    async def _draw(
        self, child: _Child, source: StoredSource, number: int, dpi: int, box: Bbox | None
    ) -> bytes:
        try:
            async with asyncio.timeout(self._draw_seconds):
                jpeg = await child.draw(source, number, dpi, box)
        except TimeoutError as error:
            self._slow.note(source.key, number)
            raise PageTimeout(
                f"Page {number} took longer than {self._draw_seconds:g} s to draw.", page=number
            ) from error
        except PageTimeout:
            self._slow.note(source.key, number)
            raise
        self._slow.note_drawn(source.key)
        return jpeg

    def _require_quick(self, source: StoredSource, number: int) -> None:
        reason = self._slow.refusal(source.key, number)
        if reason is not None:
            raise PageTimeout(reason, page=number)

    async def _wait_for_child(self, key: str) -> _Child:
        """Return a child that is now taken for this document. Raises Busy."""
        if (child := self._take(key)) is not None:
            return child
        if self._waiting >= _MOST_WAITING:
            raise Busy(f"{self._waiting} page images are waiting to be drawn; try again later.")
        self._waiting += 1
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                while (child := self._take(key)) is None:
                    await self._freed.wait()
                return child
        except TimeoutError:
            raise Busy("All render processes are busy with other pages; try again later.") from None
        finally:
            self._waiting -= 1

    def _take(self, key: str) -> _Child | None:
        """Take a child: the one that has the document open, else the one unused for longest."""
        taken = [child for child in self._children if child.taken_for is not None]
        if any(child.taken_for == key for child in taken):
            return None
        if self._slow.is_slow(key) and any(self._slow.is_slow(c.taken_for) for c in taken):
            return None
        free = [child for child in self._children if child.taken_for is None]
        if not free:
            return None
        child = min(free, key=lambda one: (one.key != key, one.used_at))
        child.take(key)
        return child


class _Child:
    """One render child and the document that it has open. It is used by one caller at a time."""

    def __init__(self, settings: Settings) -> None:
        self.key: str | None = None
        self.taken_for: str | None = None
        self.used_at = 0.0
        self._pdf = PdfSession(settings.pdf, settings.limits.max_pages)
        self._open_file = ExitStack()
        self._file: Path | None = None
        # None until the child has opened the file.
        self._pages: int | None = None
        self._closing: asyncio.TimerHandle | None = None

    def take(self, key: str) -> None:
        self.taken_for = key
        if self._closing is not None:
            self._closing.cancel()

    def release(self) -> None:
        loop = asyncio.get_running_loop()
        self.taken_for = None
        self.used_at = loop.time()
        self._closing = loop.call_later(_IDLE_SECONDS, self._end)

    async def fetch(self, store: DocumentStore, source: StoredSource) -> None:
        """Have the stored file at hand. Raises SourceMissing."""
        if self._file is None or self.key != source.key:
            self._close_file()
            enter = self._open_file.enter_context
            self._file = await asyncio.to_thread(enter, store.open_local(source.key))
            self.key = source.key

    async def draw(self, source: StoredSource, number: int, dpi: int, box: Bbox | None) -> bytes:
        """Draw a page of the file that was fetched."""
        if self._pages is None and self._file is not None:
            self._pages = (await self._pdf.open(self._file, source.media_type)).pages
        if not 1 <= number <= (self._pages or 0):
            raise NotFound(f"No page {number}: the document has {self._pages} pages.")
        if box is None:
            return (await self._pdf.render(number, dpi)).jpeg
        return (await self._pdf.unscaled_crop(number, dpi, box)).jpeg

    async def close(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
        self._end()

    def _close_file(self) -> None:
        self.key = self._file = self._pages = None
        self._open_file.close()

    def _end(self) -> None:
        self._pdf.kill()
        self._close_file()
