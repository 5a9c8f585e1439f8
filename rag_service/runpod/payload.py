"""A document's pages as jobs that RunPod accepts, each as good as its size allows.

Whoever posts jobs asks for one at a time, so the first is at work while the next is made. Means,
in this order and only as far as needed: as it is, pictures at 150 DPI, ZIP, fewer pages; for a
single page that is still too large 100 DPI, then a coarse JPEG. Never 72 DPI.
"""

from __future__ import annotations

import asyncio
import math
import zipfile
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from rag_service.config.options import Settings
from rag_service.errors import (
    CorruptPdf,
    PageError,
    PageUnrenderable,
    PayloadTooLarge,
    RagServiceError,
)
from rag_service.pdf.media_type import PDF
from rag_service.pdf.results import PdfWarning
from rag_service.pdf.session import PdfSession
from rag_service.pdf.shrink import ShrinkResult, shrink
from rag_service.runpod.job_body import Encoding, Envelope, job_body
from rag_service.runpod.page_ranges import balanced, ranges

FIRST_DPI, LAST_DPI = 150, 100
# Of pages that have to be drawn; of a single page that is still too large, at LAST_DPI.
FINE_QUALITY, COARSE_QUALITIES = 90, (60, 35)
# The document's name within a ZIP.
INNER_NAME = "document.pdf"


@dataclass(frozen=True, slots=True)
class Payload:
    """A job ready to post. A warning without a page is about all of its pages."""

    pages: tuple[int, ...]
    body: bytes
    warnings: tuple[PdfWarning, ...]


@dataclass(frozen=True, slots=True)
class PageRefused:
    """A page that no job can hold: PayloadTooLarge, or it cannot be read at all."""

    page: int
    error: PageError


@dataclass(frozen=True, slots=True)
class PayloadPiece:
    """Pages on their way to a job: some pages of `origin`, then, once cut, a file of their own.

    `goal`: the DPI its pictures are brought to if need be; `shrunk`: that was tried;
    `quality`: its pages are drawn as JPEGs of that quality at `dpi`.
    """

    pages: tuple[int, ...]
    origin: Path
    positions: tuple[int, ...]
    dpi: int
    goal: int = FIRST_DPI
    shrunk: bool = False
    quality: int | None = None
    file: Path | None = None
    warnings: tuple[PdfWarning, ...] = ()

    def parts(self, lengths: Sequence[int]) -> list[PayloadPiece]:
        """The pages in several pieces, yet to be cut: from this one's file where there is one."""
        origin, positions = self.origin, self.positions
        if self.file is not None:
            origin, positions = self.file, tuple(range(1, len(self.pages) + 1))
        ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
        places = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        return [
            replace(
                self, pages=self.pages[place], origin=origin, positions=positions[place], file=None
            )
            for place in places
            if self.pages[place]
        ]


class PayloadMaker:
    """Makes the jobs of one document. It reads files by path: what `pdf` has open stays open."""

    def __init__(
        self, settings: Settings, pdf: PdfSession, source: Path, media_type: str, filename: str
    ) -> None:
        self._settings = settings
        self._pdf = pdf
        self._source = source
        # Pictures become pages of a PDF by being drawn.
        self._quality = None if media_type == PDF else FINE_QUALITY
        self._filename = filename

    async def make(
        self,
        pages: Sequence[int],
        envelope: Callable[[Sequence[int]], Envelope],
        *,
        as_before: bool = False,
    ) -> AsyncGenerator[Payload | PageRefused]:
        """Every page once, in order: in a body of at most runpod.max_body_bytes, or refused.

        `as_before`: they were one job, and are to be that same one again.

        `envelope` is asked once for every set of pages that is tried. Close the iterator where
        it is not read to its end. Raises what opening the document raises, CorruptPdf excepted.
        """
        runpod = self._settings.runpod
        parts = ranges(pages, runpod.max_pages_per_job, runpod.workers)
        for part in [tuple(pages)] if as_before else parts:
            with TemporaryDirectory(prefix="payload-") as folder:
                workshop = _Workshop(
                    self._settings, self._pdf, self._source, self._filename, Path(folder), envelope
                )
                waiting = deque([workshop.begin(part, self._quality)])
                while waiting:
                    made = await workshop.advance(waiting.popleft())
                    if isinstance(made, list):
                        waiting.extendleft(reversed(made))
                    else:
                        yield made


class _Workshop:
    """Takes the pieces of one range a step further each; its files lie in `folder`."""

    def __init__(
        self,
        settings: Settings,
        pdf: PdfSession,
        source: Path,
        filename: str,
        folder: Path,
        envelope: Callable[[Sequence[int]], Envelope],
    ) -> None:
        self._most = settings.runpod.max_body_bytes
        self._may_shrink = settings.pdf.downsample_oversized
        self._time_limit = settings.pdf.shrink_time_limit
        self._pdf = pdf
        self._source = source
        self._filename = filename
        self._folder = folder
        self._envelope = cache(envelope)
        self._numbers = count()

    def begin(self, pages: tuple[int, ...], quality: int | None) -> PayloadPiece:
        """The piece that all others of the range come from."""
        dpi = self._envelope(pages).dpi
        return PayloadPiece(pages, self._source, pages, dpi, quality=quality)

    async def advance(self, piece: PayloadPiece) -> Payload | PageRefused | list[PayloadPiece]:
        """The next means for a piece: it is done, or it goes on as these pieces."""
        if piece.file is None:
            return await self._cut(piece)
        size = self._size(piece, piece.file, "base64")
        if size <= self._most:
            return await self._payload(piece, piece.file, "base64")
        if self._may_shrink and not piece.shrunk and piece.quality is None:
            return [await self._shrink(piece, piece.file)]
        zipped = await asyncio.to_thread(_zip, piece.file, self._new_file())
        size = min(size, self._size(piece, zipped, "zip+base64"))
        if size <= self._most:
            return await self._payload(piece, zipped, "zip+base64")
        if len(piece.pages) > 1:
            shares = balanced(piece.pages, max(2, math.ceil(size / self._most)))
            return piece.parts([len(share) for share in shares])
        return self._last_means(piece, size)

    async def _cut(self, piece: PayloadPiece) -> PageRefused | list[PayloadPiece]:
        target = self._new_file()
        try:
            warnings = await self._pdf.slice(
                piece.origin, piece.positions, target, dpi=piece.dpi, jpeg_quality=piece.quality
            )
        except (PageError, CorruptPdf) as error:
            return _without_blamed(piece, error)
        own = tuple(zip(piece.positions, piece.pages, strict=True))
        named = (replace(each, page=dict(own).get(each.page or 0)) for each in warnings)
        return [replace(piece, file=target, warnings=(*piece.warnings, *named))]

    async def _shrink(self, piece: PayloadPiece, file: Path) -> PayloadPiece:
        result = await shrink(self._pdf, file, piece.goal, self._new_file(), self._time_limit)
        warnings = (*piece.warnings, *_shrink_warnings(result, piece.goal))
        return replace(piece, file=result.path, shrunk=True, warnings=warnings)

    def _last_means(self, piece: PayloadPiece, size: int) -> PageRefused | list[PayloadPiece]:
        """From the source again: a copy of a coarse copy would lose more."""
        number = piece.pages[0]
        fresh = PayloadPiece(piece.pages, self._source, piece.pages, piece.dpi)
        if self._may_shrink and piece.quality is None and piece.goal != LAST_DPI:
            return [replace(fresh, goal=LAST_DPI)]
        quality = next((q for q in COARSE_QUALITIES if q < (piece.quality or 100)), None)
        if self._may_shrink and quality is not None:
            message = f"The page was sent at {LAST_DPI} DPI as a JPEG of quality {quality}."
            warning = PdfWarning(f"shrunk_{LAST_DPI}", message, number)
            return [replace(fresh, dpi=LAST_DPI, quality=quality, warnings=(warning,))]
        why = "" if self._may_shrink else " and pdf.downsample_oversized is off"
        message = (
            f"Page {number} needs a job of {size} bytes; runpod.max_body_bytes is "
            f"{self._most}{why}."
        )
        return PageRefused(number, PayloadTooLarge(message, page=number))

    async def _payload(self, piece: PayloadPiece, file: Path, encoding: Encoding) -> Payload:
        frame = job_body(self._envelope(piece.pages), self._filename, piece.pages, encoding)
        body = await asyncio.to_thread(lambda: frame.fill(file.read_bytes()))
        return Payload(piece.pages, body, piece.warnings)

    def _size(self, piece: PayloadPiece, file: Path, encoding: Encoding) -> int:
        frame = job_body(self._envelope(piece.pages), self._filename, piece.pages, encoding)
        return frame.size(file.stat().st_size)

    def _new_file(self) -> Path:
        return self._folder / f"{next(self._numbers)}.pdf"


def _without_blamed(
    piece: PayloadPiece, error: RagServiceError
) -> PageRefused | list[PayloadPiece]:
    """Part a piece that cannot be cut, so that one bad page costs itself only."""
    pages = len(piece.pages)
    if pages > 1 and error.page in piece.positions:
        before = piece.positions.index(error.page)
        return piece.parts([before, 1, pages - before - 1])
    if pages > 1:
        return piece.parts([pages // 2, pages - pages // 2])
    if piece.quality is None and not isinstance(error, PageError):
        return [replace(piece, quality=FINE_QUALITY)]
    number = piece.pages[0]
    if isinstance(error, PageError):
        return PageRefused(number, type(error)(error.message, page=number))
    return PageRefused(number, PageUnrenderable(error.message, page=number))


def _shrink_warnings(result: ShrinkResult, dpi: int) -> list[PdfWarning]:
    warnings = []
    if result.shrinker is not None:
        message = f"Pictures were brought to {dpi} DPI, since the pages were too large for a job."
        warnings.append(PdfWarning(f"shrunk_{dpi}", message))
    if result.fell_back:
        instead = "was used instead" if result.shrinker else "could not shrink the pages either"
        warnings.append(PdfWarning("shrinker_fallback", f"{result.reason}; PyMuPDF {instead}."))
    return warnings


def _zip(file: Path, target: Path) -> Path:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(file, INNER_NAME)
    return target
