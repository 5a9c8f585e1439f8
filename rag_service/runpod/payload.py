"""Make jobs from a document's pages that fit RunPod's size limit, with the least loss of quality.

Jobs are made one at a time, so that the first is read while the next is made. Steps, in this order
and only if needed: unchanged, pictures at 150 DPI, ZIP, fewer pages; for a single page that is
still too large 100 DPI, then a coarse JPEG. Never 72 DPI.
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
# JPEG qualities of rendered pages, and of a single page at LAST_DPI that is still too large.
FINE_QUALITY, COARSE_QUALITIES = 90, (60, 35)
# The document's name in a ZIP.
INNER_NAME = "document.pdf"


@dataclass(frozen=True, slots=True)
class Payload:
    """A job ready to post. A warning without a page applies to all its pages."""

    pages: tuple[int, ...]
    body: bytes
    warnings: tuple[PdfWarning, ...]


@dataclass(frozen=True, slots=True)
class PageRefused:
    """A page that fits no job (PayloadTooLarge) or that cannot be read."""

    page: int
    error: PageError


@dataclass(frozen=True, slots=True)
class PayloadPiece:
    """Pages of a future job: places in the file `origin`, and `file` once they are cut from it.

    `goal`: the DPI to which its pictures are shrunk if needed; `shrunk`: that was tried;
    `quality`: its pages are rendered as JPEGs of this quality at `dpi`.
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
        """Return uncut pieces of these lengths, from this piece's own file if it has one."""
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
    """The jobs of one document. Files are read by path; `pdf` keeps its document open."""

    def __init__(
        self, settings: Settings, pdf: PdfSession, source: Path, media_type: str, filename: str
    ) -> None:
        self._settings = settings
        self._pdf = pdf
        self._source = source
        # Pictures are rendered to become pages of a PDF.
        self._quality = None if media_type == PDF else FINE_QUALITY
        self._filename = filename

    async def make(
        self,
        pages: Sequence[int],
        envelope: Callable[[Sequence[int]], Envelope],
        *,
        as_before: bool = False,
    ) -> AsyncGenerator[Payload | PageRefused]:
        """Yield every page once, in order: in a body of at most runpod.max_body_bytes, or refused.

        `as_before`: the pages were one job before and start as one range again. `envelope` is
        called once for every set of pages that is tried. Close the iterator if it is not read to
        its end. Raises the errors of opening a document, except CorruptPdf.
        """
        runpod = self._settings.runpod
        parts = ranges(pages, runpod.max_pages_per_job, runpod.workers)
        for part in [tuple(pages)] if as_before else parts:
            with TemporaryDirectory(prefix="payload-") as folder:
                maker = _RangeMaker(
                    self._settings, self._pdf, self._source, self._filename, Path(folder), envelope
                )
                waiting = deque([maker.begin(part, self._quality)])
                while waiting:
                    made = await maker.advance(waiting.popleft())
                    if isinstance(made, list):
                        waiting.extendleft(reversed(made))
                    else:
                        yield made


class _RangeMaker:
    """The steps from one range of pages to its jobs, with files in `folder`."""

    def __init__(
        self,
        settings: Settings,
        pdf: PdfSession,
        source: Path,
        filename: str,
        folder: Path,
        envelope: Callable[[Sequence[int]], Envelope],
    ) -> None:
        self._max_bytes = settings.runpod.max_body_bytes
        self._may_shrink = settings.pdf.downsample_oversized
        self._time_limit = settings.pdf.shrink_time_limit
        self._pdf = pdf
        self._source = source
        self._filename = filename
        self._folder = folder
        self._envelope = cache(envelope)
        self._numbers = count()

    def begin(self, pages: tuple[int, ...], quality: int | None) -> PayloadPiece:
        """Return the piece with all pages of the range."""
        dpi = self._envelope(pages).dpi
        return PayloadPiece(pages, self._source, pages, dpi, quality=quality)

    async def advance(self, piece: PayloadPiece) -> Payload | PageRefused | list[PayloadPiece]:
        """Do the next step for a piece: a finished job, or the pieces to continue with."""
        if piece.file is None:
            return await self._cut(piece)
        size = self._size(piece, piece.file, "base64")
        if size <= self._max_bytes:
            return await self._payload(piece, piece.file, "base64")
        if self._may_shrink and not piece.shrunk and piece.quality is None:
            return [await self._shrink(piece, piece.file)]
        zipped = await asyncio.to_thread(_zip, piece.file, self._new_file())
        size = min(size, self._size(piece, zipped, "zip+base64"))
        if size <= self._max_bytes:
            return await self._payload(piece, zipped, "zip+base64")
        if len(piece.pages) > 1:
            shares = balanced(piece.pages, max(2, math.ceil(size / self._max_bytes)))
            return piece.parts([len(share) for share in shares])
        return self._shrink_page(piece, size)

    async def _cut(self, piece: PayloadPiece) -> PageRefused | list[PayloadPiece]:
        target = self._new_file()
        try:
            warnings = await self._pdf.slice(
                piece.origin, piece.positions, target, dpi=piece.dpi, jpeg_quality=piece.quality
            )
        except (PageError, CorruptPdf) as error:
            return _isolate(piece, error)
        own = tuple(zip(piece.positions, piece.pages, strict=True))
        named = (replace(each, page=dict(own).get(each.page or 0)) for each in warnings)
        return [replace(piece, file=target, warnings=(*piece.warnings, *named))]

    async def _shrink(self, piece: PayloadPiece, file: Path) -> PayloadPiece:
        result = await shrink(self._pdf, file, piece.goal, self._new_file(), self._time_limit)
        warnings = (*piece.warnings, *_shrink_warnings(result, piece.goal))
        return replace(piece, file=result.path, shrunk=True, warnings=warnings)

    def _shrink_page(self, piece: PayloadPiece, size: int) -> PageRefused | list[PayloadPiece]:
        """Return a coarser version of a single page, cut from the source again, or refuse it."""
        number = piece.pages[0]
        fresh = PayloadPiece(piece.pages, self._source, piece.pages, piece.dpi)
        if self._may_shrink and piece.quality is None and piece.goal != LAST_DPI:
            return [replace(fresh, goal=LAST_DPI)]
        quality = next((q for q in COARSE_QUALITIES if q < (piece.quality or 100)), None)
        if self._may_shrink and quality is not None:
            message = f"The page was sent at {LAST_DPI} DPI as a JPEG of quality {quality}."
            warning = PdfWarning(f"shrunk_{LAST_DPI}", message, number)
            return [replace(fresh, dpi=LAST_DPI, quality=quality, warnings=(warning,))]
        shrinking = "" if self._may_shrink else " and pdf.downsample_oversized is off"
        message = (
            f"Page {number} needs a job of {size} bytes; runpod.max_body_bytes is "
            f"{self._max_bytes}{shrinking}."
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


def _isolate(piece: PayloadPiece, error: RagServiceError) -> PageRefused | list[PayloadPiece]:
    """Split a piece that cannot be cut, so that one bad page does not fail the others."""
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
        message = f"Pictures were shrunk to {dpi} DPI because the pages were too large for a job."
        warnings.append(PdfWarning(f"shrunk_{dpi}", message))
    if result.fell_back:
        instead = "was used instead" if result.shrinker else "could not shrink the pages either"
        warnings.append(PdfWarning("shrinker_fallback", f"{result.reason}; PyMuPDF {instead}."))
    return warnings


def _zip(file: Path, target: Path) -> Path:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(file, INNER_NAME)
    return target
