"""PdfWorker: one document at a time, opened, planned and rendered in a child process.

Used by the prepare and ocr workers and by the API. MuPDF can hang and crash; here that costs
the page in hand, and a new child goes on with the next. PyMuPDF itself is never imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from io import BytesIO
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from rag_service import errors
from rag_service.errors import CorruptPdf, PageTimeout, PageUnrenderable, RagServiceError
from rag_service.pdf.child_limits import ChildLimits
from rag_service.pdf.child_process import ChildDied, ChildTimeout, RenderChild
from rag_service.pdf.pipe_frames import Frame
from rag_service.pdf.results import (
    Crop,
    PagePicture,
    PdfWarning,
    PlannedPage,
    Preflight,
    RenderedPage,
    ShrinkFailed,
)
from rag_service.states import OcrMode, PagePlan

if TYPE_CHECKING:
    from rag_service.config.options import PdfOptions
    from rag_service.layout.page_layout import Bbox

_DrawnPage = TypeVar("_DrawnPage", RenderedPage, PagePicture)

BATCH = 32
BATCHES_AHEAD = 2

_BY_CODE = {
    error.code: error
    for error in (
        errors.UnsupportedType, errors.EmptyFile, errors.CorruptPdf, errors.EmptyPdf,
        errors.EncryptedPdf, errors.WrongPassword, errors.TooManyPages,
        errors.PageTooLarge, errors.PageTimeout, errors.PageUnrenderable, ShrinkFailed,
    )
}  # fmt: skip


class PdfSession:
    """One render child, replaced when it is killed, worn or too large.

    Calls may overlap; they take turns. A cancelled call leaves the worker usable: the child that
    was busy with it is killed, so its answer can reach nobody else.
    """

    def __init__(self, limits: PdfOptions, max_pages: int) -> None:
        self._limits = limits
        self._max_pages = max_pages
        self._child: RenderChild | None = None
        self._source: dict[str, Any] | None = None
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

    async def open(self, path: Path, media_type: str, *, password: str | None = None) -> Preflight:
        """Open a PDF, PNG, JPEG, TIFF or WebP; it replaces the one that was open.

        Raises EmptyFile, UnsupportedType, CorruptPdf, EmptyPdf, EncryptedPdf, WrongPassword,
        TooManyPages.
        """
        async with self._turn:
            self._source = None
            self._retire_if_worn()
            source = {
                "do": "open", "path": str(path), "media_type": media_type, "password": password,
            }  # fmt: skip
            head = await self._open(source)
            if head["pages"] > self._max_pages:
                raise errors.TooManyPages(
                    f"The document has {head['pages']} pages; "
                    f"limits.max_pages is {self._max_pages}."
                )
            self._source = source
        return Preflight(
            head["pages"], head["media_type"], head["repaired"], _warnings(head["warnings"])
        )

    async def plan(self, ocr: OcrMode, pages: Sequence[int]) -> AsyncGenerator[PlannedPage]:
        """Each page's plan and native text, in the order asked; read ahead by some batches.

        A page that cannot be looked at carries its error. Raises CorruptPdf only where a
        replaced child cannot open the file again.
        """
        # By batches: a page at a time would wake the caller for each.
        planned: asyncio.Queue[list[PlannedPage] | None] = asyncio.Queue()
        room = asyncio.Semaphore(BATCHES_AHEAD)
        producer = asyncio.create_task(self._plan_all(ocr, pages, planned, room))
        producer.add_done_callback(lambda _: planned.put_nowait(None))
        try:
            while (batch := await planned.get()) is not None:
                for page in batch:
                    yield page
                room.release()
            await producer
        finally:
            producer.cancel()
            await asyncio.gather(producer, return_exceptions=True)

    async def render(self, number: int, dpi: int) -> RenderedPage:
        """Page `number` (from 1) as a JPEG; raises PageTooLarge, PageTimeout, PageUnrenderable."""
        frame = await self._ask_page({"do": "render", "page": number, "dpi": dpi})
        return _drawn(RenderedPage, number, frame)

    async def look(self, number: int, dpi: int) -> PagePicture:
        """A small picture of page `number` (from 1), for its layout. Raises as `render` does.

        The page as drawn at `dpi` is kept for `crops`, unless memory is needed for others.
        """
        frame = await self._ask_page({"do": "look", "page": number, "dpi": dpi})
        return _drawn(PagePicture, number, frame)

    async def crops(self, number: int, dpi: int, boxes: Sequence[Bbox]) -> list[Crop]:
        """Parts of page `number` drawn at `dpi`, in order, sized for OCR. Raises as `render` does.

        Boxes are in thousandths of the page. Sides become multiples of 28 pixels within
        pdf.crop_min_pixels and pdf.crop_max_side.
        """
        return await self._cut(number, dpi, boxes, fit=True)

    async def part(self, number: int, dpi: int, box: Bbox) -> Crop:
        """One part of page `number` in the page's own pixels. Raises as `render` does."""
        (part,) = await self._cut(number, dpi, [box], fit=False)
        return part

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
                raise CorruptPdf(_opening_failed(error, self._limits.open_time_limit)) from error
        _raise_error(frame.head)

    async def slice(
        self,
        source: Path,
        pages: Sequence[int],
        target: Path,
        *,
        dpi: int,
        jpeg_quality: int | None = None,
    ) -> tuple[PdfWarning, ...]:
        """Write a PDF of just these pages (from 1) of a PDF or picture file to `target`.

        Pages of a PDF are taken over as they are. Pictures, pages that cannot be taken over, and
        all where `jpeg_quality` is given, are drawn at `dpi`. Raises CorruptPdf where no page is
        to blame, else PageUnrenderable, PageTimeout, PageTooLarge. The open document stays open.
        """
        request = {
            "do": "slice", "path": str(source), "pages": list(pages), "target": str(target),
            "dpi": dpi, "jpeg_quality": jpeg_quality,
        }  # fmt: skip
        drawn, last = await self._tell(request)
        number = drawn[-1].head["page"] if drawn else None
        if isinstance(last, Frame):
            _raise_error(last.head, number)
            return _warnings(last.head["warnings"])
        if number is None:
            raise CorruptPdf(f"Taking pages out of the file {_ended(last)}.") from last
        raise self._page_error(last, number) from last

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
                raise ShrinkFailed(f"Rewriting the pictures {_ended(error)}.") from error
        _raise_error(frame.head)

    async def compare(self, original: Path, copy: Path) -> None:
        """See whether a shrunk PDF shows what the original shows, page by page.

        Raises ShrinkFailed that names what is missing, and what opening raises.
        """
        request = {"do": "compare", "path": str(original), "copy": str(copy)}
        seen, last = await self._tell(request)
        if not isinstance(last, Frame):
            raise ShrinkFailed(f"Comparing page {len(seen) + 1} {_ended(last)}.") from last
        _raise_error(last.head)

    async def close(self) -> None:
        """Kill the child; calls that still wait are cancelled. `open` may follow."""
        self._source = None
        self._discard()

    async def _cut(self, number: int, dpi: int, boxes: Sequence[Bbox], *, fit: bool) -> list[Crop]:
        frame = await self._ask_page(
            {"do": "crops", "page": number, "dpi": dpi, "boxes": list(boxes), "fit": fit}
        )
        jpegs = BytesIO(frame.body)
        return [
            Crop(jpegs.read(length), width, height) for length, width, height in frame.head["crops"]
        ]

    async def _ask_page(self, request: dict[str, Any]) -> Frame:
        """An answer about one page. Raises what the page is to blame for."""
        number = request["page"]
        async with self._turn:
            try:
                frame = await self._ask(request, self._limits.page_time_limit)
            except (ChildTimeout, ChildDied) as error:
                raise self._page_error(error, number) from error
        _raise_error(frame.head, number)
        return frame

    async def _plan_all(
        self,
        ocr: OcrMode,
        pages: Sequence[int],
        planned: asyncio.Queue[list[PlannedPage] | None],
        room: asyncio.Semaphore,
    ) -> None:
        source = self._source
        for batch in _batches(pages):
            await room.acquire()
            async with self._turn:
                # Whoever asked is gone: another document has been opened since.
                if self._source is not source:
                    return
                planned.put_nowait(await self._plan_batch(ocr, batch))

    async def _plan_batch(self, ocr: OcrMode, batch: Sequence[int]) -> list[PlannedPage]:
        """Answers come in order, so the page that ended a child is the first unanswered one."""
        pages: list[PlannedPage] = []
        while len(pages) < len(batch):
            try:
                await self._stream(ocr, batch[len(pages) :], pages.append)
            except (ChildTimeout, ChildDied) as error:
                pages.append(await self._second_look(ocr, batch[len(pages)], error))
        return pages

    async def _second_look(
        self, ocr: OcrMode, number: int, first: ChildTimeout | ChildDied
    ) -> PlannedPage:
        """Again as before where the child died, for another program may have killed it.

        Then its text alone, which may be fine: drawing a page is what mostly hangs.
        """
        for pixels in (True, False) if isinstance(first, ChildDied) else (False,):
            pages: list[PlannedPage] = []
            with contextlib.suppress(ChildTimeout, ChildDied):
                await self._stream(ocr, [number], pages.append, pixels=pixels)
            if pages and (pixels or pages[0].markdown):
                return pages[0]
        failure = self._page_error(first, number)
        return PlannedPage(number, PagePlan.OCR, failure.code, error=failure)

    async def _stream(
        self,
        ocr: OcrMode,
        pages: Sequence[int],
        give: Callable[[PlannedPage], None],
        *,
        pixels: bool = True,
    ) -> None:
        request = {"do": "plan", "ocr": ocr.value, "pages": list(pages), "pixels": pixels}
        child = await self._ready()
        try:
            child.send(Frame(request))
            for number in pages:
                frame = await child.receive(self._limits.page_time_limit)
                give(_planned(frame.head, number))
        except BaseException:
            self._discard()
            raise

    async def _ask(self, request: dict[str, Any], limit: float) -> Frame:
        """One answer; asked twice where the child died, for another program may have killed it."""
        with contextlib.suppress(ChildDied):
            return await self._exchange(await self._ready(), request, limit)
        return await self._exchange(await self._ready(), request, limit)

    async def _exchange(self, child: RenderChild, request: dict[str, Any], limit: float) -> Frame:
        try:
            child.send(Frame(request))
            return await child.receive(limit)
        except BaseException:
            self._discard()
            raise

    async def _tell(
        self, request: dict[str, Any]
    ) -> tuple[list[Frame], Frame | ChildTimeout | ChildDied]:
        """An answer in several frames: those on the way, then the last one or what cut it off.

        Asked twice where the child died, for another program may have killed it.
        """
        async with self._turn:
            told = await self._tell_once(request)
            return await self._tell_once(request) if isinstance(told[1], ChildDied) else told

    async def _tell_once(
        self, request: dict[str, Any]
    ) -> tuple[list[Frame], Frame | ChildTimeout | ChildDied]:
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
            self._discard()
            return frames, error
        except BaseException:
            self._discard()
            raise

    async def _ready(self) -> RenderChild:
        """A living child that has the document open."""
        if self._child is not None and (
            not self._child.alive or self._child.mib > self._limits.child_max_mib
        ):
            self._discard()
        if self._child is None and self._source is not None:
            await self._open(self._source)
        return await self._started()

    async def _open(self, source: dict[str, Any]) -> dict[str, Any]:
        """Open in a child, in a second one where the first died; raises what opening says."""
        limit = self._limits.open_time_limit
        try:
            with contextlib.suppress(ChildDied):
                return await self._open_once(source, limit)
            return await self._open_once(source, limit)
        except (ChildTimeout, ChildDied) as error:
            raise CorruptPdf(_opening_failed(error, limit)) from error

    async def _open_once(self, source: dict[str, Any], limit: float) -> dict[str, Any]:
        child = await self._started()
        frame = await self._exchange(child, source, limit)
        child.documents += 1
        _raise_error(frame.head)
        return frame.head

    async def _started(self) -> RenderChild:
        if self._child is None:
            limits = self._limits
            self._child = await RenderChild.start(
                ChildLimits(
                    max_pixels=limits.max_pixels,
                    jpeg_quality=limits.jpeg_quality,
                    crop_min_pixels=limits.crop_min_pixels,
                    crop_max_side=limits.crop_max_side,
                    raster_cache_mib=limits.raster_cache_mib,
                    trust_hidden_text=limits.trust_hidden_text,
                    max_mib=limits.child_max_mib,
                )
            )
        return self._child

    def _retire_if_worn(self) -> None:
        child = self._child
        if child is not None and (
            not child.alive
            or child.documents >= self._limits.child_max_documents
            or child.mib > self._limits.child_max_mib
        ):
            self._discard()

    def _discard(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _page_error(self, error: ChildTimeout | ChildDied, number: int) -> RagServiceError:
        if isinstance(error, ChildTimeout):
            limit = self._limits.page_time_limit
            return PageTimeout(
                f"Page {number} took longer than pdf.page_time_limit, {limit:g} s.", page=number
            )
        return PageUnrenderable(f"Page {number} brought the render process down.", page=number)


def _batches(pages: Sequence[int]) -> Iterator[list[int]]:
    rest = iter(pages)
    while batch := list(islice(rest, BATCH)):
        yield batch


def _ended(error: ChildTimeout | ChildDied) -> str:
    if isinstance(error, ChildTimeout):
        return "took too long"
    return "brought the render process down"


def _opening_failed(error: ChildTimeout | ChildDied, limit: float) -> str:
    if isinstance(error, ChildTimeout):
        return f"Opening the file took longer than pdf.open_time_limit, {limit:g} s."
    return "Opening the file brought the render process down."


def _error_of(head: dict[str, Any], page: int | None = None) -> RagServiceError | None:
    if "error" not in head:
        return None
    kind = _BY_CODE.get(head["error"], errors.Internal)
    return kind(head["message"] or None, page=page)


def _raise_error(head: dict[str, Any], page: int | None = None) -> None:
    error = _error_of(head, page)
    if error is not None:
        raise error


def _warnings(rows: Sequence[Sequence[Any]]) -> tuple[PdfWarning, ...]:
    return tuple(PdfWarning(code, message, page) for code, message, page in rows)


def _drawn(kind: type[_DrawnPage], number: int, frame: Frame) -> _DrawnPage:
    head = frame.head
    return kind(
        number, frame.body, head["width"], head["height"], head["dpi"], head["grey"],
        _warnings(head["warnings"]),
    )  # fmt: skip


def _planned(head: dict[str, Any], number: int) -> PlannedPage:
    error = _error_of(head, number)
    if error is not None:
        return PlannedPage(number, PagePlan.OCR, error.code, error=error)
    return PlannedPage(
        number, PagePlan(head["plan"]), head["reason"], head["width"], head["height"],
        head["markdown"], _warnings(head["warnings"]), head["no_text"],
    )  # fmt: skip
