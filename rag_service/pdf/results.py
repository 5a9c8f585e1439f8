"""The results of PdfSession: pages planned, drawn and cut, warnings. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from rag_service.errors import RagServiceError
from rag_service.states import PagePlan


class ShrinkFailed(RagServiceError):
    """A shrinker produced no file that can be trusted; the original is used."""


@dataclass(frozen=True, slots=True)
class PdfWarning:
    """A defect that belongs into the result; `page` counts from 1, None: the whole document."""

    code: str
    message: str
    page: int | None = None


@dataclass(frozen=True, slots=True)
class Preflight:
    """A document that was opened."""

    pages: int
    media_type: str
    repaired: bool
    warnings: tuple[PdfWarning, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedPage:
    """One page's plan and, if it is native, its text.

    `number` counts from 1; sizes are points (1/72 inch) as the page is shown. `no_text`: OCR is
    off and the page has ink but no text layer. `error`: the page could not be planned; `plan` is
    then without meaning.
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
    """A page as a JPEG of width x height pixels; `dpi` is its actual resolution."""

    number: int
    jpeg: bytes
    width: int
    height: int
    dpi: float
    grey: bool
    warnings: tuple[PdfWarning, ...] = ()


@dataclass(frozen=True, slots=True)
class PagePicture:
    """A page drawn at `dpi` with width x height pixels; `jpeg` is a smaller picture of it."""

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
