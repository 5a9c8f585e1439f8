"""PdfSession: one document at a time, opened, planned and drawn in a child process.

MuPDF can hang and crash: that costs one page, and a new child continues with the next page.
PyMuPDF is never imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rag_service import errors
from rag_service.errors import CorruptPdf
from rag_service.pdf.child_process import ChildDied, ChildTimeout, RenderChild
from rag_service.pdf.page_failures import (
    failed_page,
    opening_failed,
    page_error,
    reason,
    untried,
)
from rag_service.pdf.page_times import PageTimes
from rag_service.pdf.pipe_frames import Frame
from rag_service.pdf.planned_queue import BATCH, PlannedQueue
from rag_service.pdf.replaced_child import ReplacedChild
from rag_service.pdf.result_frames import (
    crops_in,
    drawn_page,
    planned_page,
    raise_error,
    warnings_from,
)
from rag_service.pdf.results import (
    Crop,
    PagePicture,
    PdfWarning,
    PlannedPage,
    Preflight,
    RenderedPage,
    ShrinkFailed,
)
from rag_service.runtime.time_spent import TimeSpent
from rag_service.states import OcrMode

if TYPE_CHECKING:
    from rag_service.config.options import PdfOptions
    from rag_service.layout.page_layout import Bbox

# The frames of an answer that comes in several, and its last frame or what cut it off.
_Frames = tuple[list[Frame], Frame | ChildTimeout | ChildDied]


class PdfSession:
    """One render child, replaced when it died, has opened many documents or is too large.

    Calls may overlap; they run one after the other. A cancelled call leaves the session usable:
    the child that was busy with it is killed, so no later call can receive its answer.
    """

    def __init__(self, limits: PdfOptions, max_pages: int) -> None:
        self._limits = limits
        self._max_pages = max_pages
        self._child = ReplacedChild(limits)
        self._source: dict[str, Any] | None = None
        self._times = self._times_for(0)
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> PdfSession:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def open(
        self,
        path: Path,
        media_type: str,
        *,
        password: str | None = None,
        spent: TimeSpent | None = None,
    ) -> Preflight:
        """Open a PDF, PNG, JPEG, TIFF or WebP file; the document that was open is closed.

        With `spent`, the time that its pages took before, that of all pages together is bounded
        too, and pages beyond it fail with PageTimeout; otherwise only that of each request.
        Raises EmptyFile, UnsupportedType, CorruptPdf, EmptyPdf, EncryptedPdf, WrongPassword,
        TooManyPages.
        """
        async with self._turn:
            self._source = None
            self._times = self._times_for(0)
            self._child.discard_before_document()
            source = {
                "do": "open", "path": str(path), "media_type": media_type, "password": password,
            }  # fmt: skip
            head = await self._open(source)
            opening, self._times = self._times, self._times_for(head["pages"], spent)
            self._times.charge(opening.spent.seconds)
            if head["pages"] > self._max_pages:
                raise errors.TooManyPages(
                    f"The document has {head['pages']} pages; "
                    f"limits.max_pages is {self._max_pages}."
                )
            self._source = source
        return Preflight(
            head["pages"], head["media_type"], head["repaired"], warnings_from(head["warnings"])
        )

    async def plan(self, ocr: OcrMode, pages: Sequence[int]) -> AsyncGenerator[PlannedPage]:
        """Yield each page's plan and native text, in the given order; some batches are read ahead.

        A page that cannot be planned carries its error. After some pages in a row that ran into
        their limit, the others are not tried and carry that error too. Raises CorruptPdf only if
        a replaced child cannot open the file again.
        """
        planned = PlannedQueue()
        producer = asyncio.create_task(self._plan_all(ocr, pages, planned))
        producer.add_done_callback(lambda _: planned.end())
        try:
            while (batch := await planned.take()) is not None:
                for page in batch:
                    yield page
                planned.release(len(batch))
            await producer
        finally:
            producer.cancel()
            await asyncio.gather(producer, return_exceptions=True)

    async def render(self, number: int, dpi: int) -> RenderedPage:
        """Draw page `number` (from 1) as a JPEG.

        Raises PageTooLarge, PageTimeout, PageUnrenderable.
        """
        frame = await self._ask_page({"do": "render", "page": number, "dpi": dpi})
        return drawn_page(RenderedPage, number, frame)

    async def layout_picture(self, number: int, dpi: int) -> PagePicture:
        """Draw a small picture of page `number` (from 1) for its layout. Raises as `render` does.

        The page as drawn at `dpi` is kept for `crops`, unless memory is needed for other pages.
        """
        frame = await self._ask_page({"do": "layout_picture", "page": number, "dpi": dpi})
        return drawn_page(PagePicture, number, frame)

    async def crops(self, number: int, dpi: int, boxes: Sequence[Bbox]) -> list[Crop]:
        """Cut regions of page `number`, drawn at `dpi`, sized for OCR. Raises as `render` does.

        Boxes are in thousandths of the page. Sides become multiples of 28 pixels within
        pdf.crop_min_pixels and pdf.crop_max_side.
        """
        return await self._cut(number, dpi, boxes, fit=True)

    async def unscaled_crop(self, number: int, dpi: int, box: Bbox) -> Crop:
        """Cut one region of page `number` in the page's own pixels. Raises as `render` does."""
        (crop,) = await self._cut(number, dpi, [box], fit=False)
        return crop

    async def decrypt(self, path: Path, password: str, target: Path) -> None:
        """Write a copy of a PDF without its encryption to `target`.

        Raises WrongPassword, EncryptedPdf, CorruptPdf. The open document stays open.
        """
        request = {
            "do": "decrypt", "path": str(path), "password": password, "target": str(target),
        }  # fmt: skip
        async with self._turn:
            try:
                frame = await self._ask(request, self._limits.open_time_limit)
            except (ChildTimeout, ChildDied) as error:
                raise CorruptPdf(opening_failed(error, self._limits.open_time_limit)) from error
        raise_error(frame.head)

    async def slice(
        self,
        source: Path,
        pages: Sequence[int],
        target: Path,
        *,
        dpi: int,
        jpeg_quality: int | None = None,
    ) -> tuple[PdfWarning, ...]:
        """Write a PDF of only these pages (from 1) of a PDF or picture file to `target`.

        Pages of a PDF are copied unchanged. Pictures, pages that cannot be copied, and all pages
        if `jpeg_quality` is given, are drawn at `dpi`. Raises PageUnrenderable, PageTimeout or
        PageTooLarge for a page, else CorruptPdf. The open document stays open.
        """
        request = {
            "do": "slice", "path": str(source), "pages": list(pages), "target": str(target),
            "dpi": dpi, "jpeg_quality": jpeg_quality,
        }  # fmt: skip
        drawn, last = await self._ask_for_frames(request)
        number = drawn[-1].head["page"] if drawn else None
        if isinstance(last, Frame):
            raise_error(last.head, number)
            return warnings_from(last.head["warnings"])
        if number is None:
            raise CorruptPdf(f"Copying pages of the file {reason(last)}.") from last
        raise page_error(last, number, self._limits) from last

    async def rewrite_images(self, source: Path, dpi: int, target: Path, time_limit: float) -> None:
        """Write a copy of a PDF whose finer pictures have `dpi` to `target`.

        Raises ShrinkFailed and what opening raises. The open document stays open.
        """
        request = {
            "do": "rewrite_images", "path": str(source), "dpi": dpi, "target": str(target),
        }  # fmt: skip
        async with self._turn:
            try:
                frame = await self._ask(request, time_limit)
            except (ChildTimeout, ChildDied) as error:
                raise ShrinkFailed(f"Rewriting the pictures {reason(error)}.") from error
        raise_error(frame.head)

    async def compare(self, original: Path, copy: Path) -> None:
        """Check page by page that a shrunk PDF shows what the original shows.

        Raises ShrinkFailed that names what is missing, and what opening raises.
        """
        request = {"do": "compare", "path": str(original), "copy": str(copy)}
        compared, last = await self._ask_for_frames(request)
        if not isinstance(last, Frame):
            raise ShrinkFailed(f"Comparing page {len(compared) + 1} {reason(last)}.") from last
        raise_error(last.head)

    @property
    def spent(self) -> TimeSpent:
        """The time that the pages of the open document took, with that before it was opened."""
        return self._times.spent

    @property
    def max_mib(self) -> int:
        """The most memory that one document may take."""
        return self._limits.child_max_mib

    async def close(self) -> None:
        """Kill the child; calls that still wait are cancelled. `open` may follow."""
        self.kill()

    def kill(self) -> None:
        """Do the same without an event loop, when this process is about to end."""
        self._source = None
        self._child.discard()

    async def _cut(self, number: int, dpi: int, boxes: Sequence[Bbox], *, fit: bool) -> list[Crop]:
        frame = await self._ask_page(
            {"do": "crops", "page": number, "dpi": dpi, "boxes": list(boxes), "fit": fit}
        )
        return crops_in(frame)

    async def _ask_page(self, request: dict[str, Any]) -> Frame:
        """Return an answer about one page. Raises the page's error."""
        number, attempts = request["page"], self._times.drawing
        async with self._turn:
            if attempts.given_up or self._times.used_up:
                raise untried(number, self._limits, self._times)
            try:
                frame = await self._ask(request, attempts.limit)
            except (ChildTimeout, ChildDied) as error:
                attempts.note(late=isinstance(error, ChildTimeout))
                raise page_error(error, number, self._limits) from error
        attempts.note(late=False)
        raise_error(frame.head, number)
        return frame

    async def _plan_all(self, ocr: OcrMode, pages: Sequence[int], planned: PlannedQueue) -> None:
        source = self._source
        for batch in _batches(pages):
            await planned.wait_for_place()
            async with self._turn:
                # Another document has been opened since; the caller no longer waits.
                if self._source is not source:
                    return
                await self._plan_batch(ocr, batch, planned)

    async def _plan_batch(self, ocr: OcrMode, batch: Sequence[int], planned: PlannedQueue) -> None:
        """Plan a batch. Answers come in order: the first missing page is what ended the child."""
        done = 0

        def accept(page: PlannedPage) -> None:
            nonlocal done
            done += 1
            planned.put(page)

        while done < len(batch) and not self._is_given_up:
            pixels = not self._times.with_pixels.given_up
            try:
                await self._stream(ocr, batch[done:], accept, pixels=pixels)
            except (ChildTimeout, ChildDied) as error:
                accept(await self._plan_again(ocr, batch[done], error, pixels=pixels))
        for number in batch[done:]:
            accept(self._untried(number))

    @property
    def _is_given_up(self) -> bool:
        return self._times.text_alone.given_up or self._times.used_up

    async def _plan_again(
        self, ocr: OcrMode, number: int, first: ChildTimeout | ChildDied, *, pixels: bool
    ) -> PlannedPage:
        """Plan a page again, as before if the child died: another program may have killed it.

        Then by its text alone: it is mostly the drawing of a page that hangs.
        """
        tries = (pixels, False) if isinstance(first, ChildDied) else (False,) if pixels else ()
        for again in tries:
            pages: list[PlannedPage] = []
            with contextlib.suppress(ChildTimeout, ChildDied):
                await self._stream(ocr, [number], pages.append, pixels=again)
            if pages and (again or pages[0].markdown):
                return pages[0]
        return failed_page(number, page_error(first, number, self._limits))

    def _untried(self, number: int) -> PlannedPage:
        return failed_page(number, untried(number, self._limits, self._times))

    async def _stream(
        self,
        ocr: OcrMode,
        pages: Sequence[int],
        accept: Callable[[PlannedPage], None],
        *,
        pixels: bool = True,
    ) -> None:
        """Plan pages in one request. A page without pixels and without text is an error.

        Raises ChildTimeout, ChildDied.
        """
        request = {"do": "plan", "ocr": ocr.value, "pages": list(pages), "pixels": pixels}
        attempts = self._times.with_pixels if pixels else self._times.text_alone
        child = await self._ready()
        try:
            child.send(Frame(request))
            for number in pages:
                frame = await self._receive(child, attempts.limit)
                for kind in (attempts, self._times.text_alone):
                    kind.note(late=False)
                accept(self._accepted(planned_page(frame.head, number), pixels=pixels))
                if self._times.used_up:
                    # The child goes on with the other pages of the request.
                    self._child.discard()
                    return
        except ChildTimeout:
            attempts.note(late=True)
            self._child.discard()
            raise
        except BaseException:
            self._child.discard()
            raise

    def _accepted(self, page: PlannedPage, *, pixels: bool) -> PlannedPage:
        """Return the page, or its error if it had to be planned by a text that it does not have."""
        if pixels or page.markdown or page.error:
            return page
        return self._untried(page.number)

    async def _ask(self, request: dict[str, Any], limit: float) -> Frame:
        """Return one answer. Asks twice if the child died: another program may have killed it."""
        with contextlib.suppress(ChildDied):
            return await self._exchange(await self._ready(), request, limit)
        return await self._exchange(await self._ready(), request, limit)

    async def _exchange(self, child: RenderChild, request: dict[str, Any], limit: float) -> Frame:
        try:
            child.send(Frame(request))
            return await self._receive(child, limit)
        except BaseException:
            self._child.discard()
            raise

    async def _receive(self, child: RenderChild, limit: float) -> Frame:
        """Return the next frame; its processor time is charged to the open document."""
        started, before = time.monotonic(), child.processor_seconds()
        try:
            frame = await child.receive(limit)
        except (ChildTimeout, ChildDied):
            self._times.charge(min(limit, time.monotonic() - started))
            raise
        self._times.charge(child.processor_seconds() - before)
        return frame

    async def _ask_for_frames(self, request: dict[str, Any]) -> _Frames:
        """Return an answer in several frames. Asks twice if the child died, as `_ask` does."""
        async with self._turn:
            frames, last = await self._receive_frames(request)
            if isinstance(last, ChildDied):
                return await self._receive_frames(request)
            return frames, last

    async def _receive_frames(self, request: dict[str, Any]) -> _Frames:
        frames: list[Frame] = []
        child = await self._ready()
        try:
            child.send(Frame(request))
            while True:
                frame = await child.receive(self._limits.open_time_limit)
                if "last" in frame.head or "error" in frame.head:
                    return frames, frame
                frames.append(frame)
        except (ChildTimeout, ChildDied) as error:
            self._child.discard()
            return frames, error
        except BaseException:
            self._child.discard()
            raise

    async def _ready(self) -> RenderChild:
        """Return a living child that has the document open."""
        self._child.discard_before_page()
        if self._child.pid is None and self._source is not None:
            await self._open(self._source)
        return await self._child.started()

    async def _open(self, source: dict[str, Any]) -> dict[str, Any]:
        """Open in a child, in a second one if the first died. Raises the opening's error."""
        limit = self._limits.open_time_limit
        try:
            with contextlib.suppress(ChildDied):
                return await self._open_once(source, limit)
            return await self._open_once(source, limit)
        except (ChildTimeout, ChildDied) as error:
            raise CorruptPdf(opening_failed(error, limit)) from error

    async def _open_once(self, source: dict[str, Any], limit: float) -> dict[str, Any]:
        child = await self._child.started()
        frame = await self._exchange(child, source, limit)
        child.documents += 1
        child.opened_mib = child.mib
        raise_error(frame.head)
        return frame.head

    def reap(self) -> None:
        """Reap the child if it has ended while it was idle. Safe in a handler of SIGCHLD."""
        self._child.reap()

    def _times_for(self, pages: int, spent: TimeSpent | None = None) -> PageTimes:
        limits = self._limits
        together = limits.document_time_base + limits.document_time_per_page * pages
        bound = math.inf if spent is None else together
        return PageTimes(limits.page_time_limit, bound, spent)


def _batches(pages: Sequence[int]) -> Iterator[list[int]]:
    rest = iter(pages)
    while batch := list(islice(rest, BATCH)):
        yield batch
