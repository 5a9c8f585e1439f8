"""What callers of the pdf room get back: parsers, workers and the API. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from rag_service.errors import RagServiceError
from rag_service.states import PagePlan


class ShrinkFailed(RagServiceError):
    """A shrinker brought no file that can be trusted; the original is used."""


@dataclass(frozen=True, slots=True)
class PdfWarning:
    """Something the reader of the result should know; page counts from 1, None: the document."""

    code: str
    message: str
    page: int | None = None


@dataclass(frozen=True, slots=True)
class Preflight:
    """A document that opened."""

    pages: int
    media_type: str
    repaired: bool
    warnings: tuple[PdfWarning, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedPage:
    """One page's plan and, where it is native, its text.

    `number` counts from 1; sizes are points (1/72 inch) as the page is shown. `no_text`: OCR is
    off and the page has ink but no text layer. `error`: the page could not be looked at, and
    `plan` says nothing.
    """

    number: int
    plan: PagePlan
    reason: str
    width_pt: float = 0.0
    height_pt: float = 0.0
    markdown: str = ""
    warnings: tuple[PdfWarning, ...] = ()
    no_text: bool = False
    error: RagServiceError | None = None


@dataclass(frozen=True, slots=True)
class RenderedPage:
    """A page as a JPEG of width x height pixels; `dpi` is the resolution it really has."""

    number: int
    jpeg: bytes
    width: int
    height: int
    dpi: float
    grey: bool
    warnings: tuple[PdfWarning, ...] = ()


@dataclass(frozen=True, slots=True)
class PagePicture:
    """A page drawn at `dpi` with width x height pixels; `jpeg` is a small picture of it."""

    number: int
    jpeg: bytes
    width: int
    height: int
    dpi: float
    grey: bool
    warnings: tuple[PdfWarning, ...] = ()


@dataclass(frozen=True, slots=True)
class Crop:
    """A part of a page as a JPEG of width x height pixels."""

    jpeg: bytes
    width: int
    height: int
