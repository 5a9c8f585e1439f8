"""The open document: a PDF or a picture file. Runs in the render child."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from rag_service.errors import PageUnrenderable, RagServiceError, UnsupportedType
from rag_service.pdf.child import preflight
from rag_service.pdf.child.image_files import ImageSource
from rag_service.pdf.child.memory_shortage import is_shortage, too_large
from rag_service.pdf.child.page_plan import PagePlanner
from rag_service.pdf.child.raster import Raster
from rag_service.pdf.child.render import draw_page
from rag_service.pdf.child_limits import ChildLimits
from rag_service.pdf.media_type import PDF
from rag_service.pdf.results import PlannedPage
from rag_service.states import OcrMode


class OpenedFile(Protocol):
    """An open document. Pages count from 1; plan and draw raise PageUnrenderable."""

    media_type: str
    pages: int
    repaired: bool

    def plan(self, number: int, mode: OcrMode, *, pixels: bool) -> PlannedPage: ...

    def draw(self, number: int, dpi: float) -> Raster: ...

    def close(self) -> None: ...


class PdfSource:
    """A PDF opened by PyMuPDF."""

    media_type = PDF

    def __init__(self, path: Path, password: str | None, limits: ChildLimits) -> None:
        self._limits = limits
        self._document = preflight.open_pdf(path, password)
        self.pages: int = self._document.page_count
        self.repaired: bool = self._document.is_repaired

    def plan(self, number: int, mode: OcrMode, *, pixels: bool) -> PlannedPage:
        planner = PagePlanner(mode, trust_hidden_text=self._limits.trust_hidden_text, pixels=pixels)
        try:
            return planner.plan(self._page(number), number)
        except preflight.MUPDF_ERRORS as error:
            raise self._page_error(number, error) from error

    def draw(self, number: int, dpi: float) -> Raster:
        try:
            return draw_page(self._page(number), number, dpi, max_pixels=self._limits.max_pixels)
        except preflight.MUPDF_ERRORS as error:
            raise self._page_error(number, error) from error

    def close(self) -> None:
        self._document.close()

    def _page_error(self, number: int, error: BaseException) -> RagServiceError:
        if is_shortage(error):
            return too_large(number, self._limits.max_mib)
        return _unrenderable(number, error)

    def _page(self, number: int) -> Any:
        # PyMuPDF counts a number below 0 from the end.
        if not 1 <= number <= self.pages:
            raise PageUnrenderable(f"The document has no page {number}.", page=number)
        return self._document.load_page(number - 1)


def open_file(path: Path, media_type: str, password: str | None, limits: ChildLimits) -> OpenedFile:
    """Open a file by its bytes; the declared `media_type` is only used in the error message."""
    kind = preflight.image_type(path)
    if kind is not None:
        return ImageSource(path, kind, limits)
    try:
        return PdfSource(path, password, limits)
    except UnsupportedType as error:
        raise UnsupportedType(
            f"The file was sent as {media_type} but is not a PDF, PNG, JPEG, TIFF or WebP file."
        ) from error


def _unrenderable(number: int, error: BaseException) -> PageUnrenderable:
    reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return PageUnrenderable(f"Page {number} cannot be rendered ({reason}).", page=number)
