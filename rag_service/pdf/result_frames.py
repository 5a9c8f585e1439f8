"""Results and errors as frames on the pipe: written by the render child, read by PdfSession.

Each pair of functions is one format, so that both ends change together.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any, TypeVar

from rag_service import errors
from rag_service.errors import RagServiceError
from rag_service.pdf.pipe_frames import Frame
from rag_service.pdf.results import (
    Crop,
    PagePicture,
    PdfWarning,
    PlannedPage,
    RenderedPage,
    ShrinkFailed,
)
from rag_service.states import PagePlan

_DrawnPage = TypeVar("_DrawnPage", RenderedPage, PagePicture)
WarningRow = tuple[str, str, int | None]

_BY_CODE = {
    error.code: error
    for error in (
        errors.UnsupportedType, errors.EmptyFile, errors.CorruptPdf, errors.EmptyPdf,
        errors.EncryptedPdf, errors.WrongPassword, errors.TooManyPages,
        errors.PageTooLarge, errors.PageTimeout, errors.PageUnrenderable, ShrinkFailed,
    )
}  # fmt: skip


def error_head(error: RagServiceError) -> dict[str, Any]:
    """Return the head of a frame that reports an error."""
    return {"error": error.code, "message": error.message}


def error_in(head: dict[str, Any], page: int | None = None) -> RagServiceError | None:
    """Return the error that a head reports, or None."""
    if "error" not in head:
        return None
    kind = _BY_CODE.get(head["error"], errors.Internal)
    return kind(head["message"] or None, page=page)


def raise_error(head: dict[str, Any], page: int | None = None) -> None:
    """Raise the error that a head reports, if there is one."""
    error = error_in(head, page)
    if error is not None:
        raise error


def warning_rows(warnings: Sequence[PdfWarning]) -> list[WarningRow]:
    """Return warnings as JSON can carry them."""
    return [(warning.code, warning.message, warning.page) for warning in warnings]


def warnings_from(rows: Sequence[Sequence[Any]]) -> tuple[PdfWarning, ...]:
    """Return the warnings of `warning_rows`."""
    return tuple(PdfWarning(code, message, page) for code, message, page in rows)


def planned_head(page: PlannedPage) -> dict[str, Any]:
    """Return the head of a frame with a planned page."""
    return {
        "plan": page.plan, "reason": page.reason, "width": page.width_pt, "height": page.height_pt,
        "markdown": page.markdown, "no_text": page.no_text,
        "warnings": warning_rows(page.warnings),
    }  # fmt: skip


def planned_page(head: dict[str, Any], number: int) -> PlannedPage:
    """Return the planned page of a head; an error becomes a page with that error."""
    error = error_in(head, number)
    if error is not None:
        return PlannedPage(number, PagePlan.OCR, error.code, error=error)
    return PlannedPage(
        number, PagePlan(head["plan"]), head["reason"], head["width"], head["height"],
        head["markdown"], warnings_from(head["warnings"]), head["no_text"],
    )  # fmt: skip


def drawn_head(page: RenderedPage | PagePicture) -> dict[str, Any]:
    """Return the head of a frame with a drawn page; the body is its JPEG."""
    return {
        "width": page.width, "height": page.height, "dpi": page.dpi, "grey": page.grey,
        "warnings": warning_rows(page.warnings),
    }  # fmt: skip


def drawn_page(kind: type[_DrawnPage], number: int, frame: Frame) -> _DrawnPage:
    """Return the drawn page of a frame."""
    head = frame.head
    return kind(
        number, frame.body, head["width"], head["height"], head["dpi"], head["grey"],
        warnings_from(head["warnings"]),
    )  # fmt: skip


def crops_frame(crops: Sequence[Crop]) -> Frame:
    """Return a frame with crops; the body is all JPEGs, one after the other."""
    sizes = [(len(crop.jpeg), crop.width, crop.height) for crop in crops]
    return Frame({"crops": sizes}, b"".join(crop.jpeg for crop in crops))


def crops_in(frame: Frame) -> list[Crop]:
    """Return the crops of a frame."""
    jpegs = BytesIO(frame.body)
    return [Crop(jpegs.read(length), *size) for length, *size in frame.head["crops"]]
