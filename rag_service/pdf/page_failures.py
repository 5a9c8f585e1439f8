"""What to say of pages and files whose render child took too long, crashed, or was not asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rag_service.errors import PageTimeout, PageUnrenderable, RagServiceError
from rag_service.pdf.child_process import ChildDied, ChildTimeout
from rag_service.pdf.results import PlannedPage
from rag_service.states import PagePlan

if TYPE_CHECKING:
    from rag_service.config.options import PdfOptions
    from rag_service.pdf.page_times import PageTimes

ChildFailure = ChildTimeout | ChildDied


def untried(number: int, limits: PdfOptions, times: PageTimes) -> PageTimeout:
    """Return the error of a page that was not tried, because others took too long."""
    if times.used_up:
        return PageTimeout(
            f"Page {number} was not tried: the pages of the document took longer than "
            "pdf.document_time_base + pages x pdf.document_time_per_page, "
            f"{times.document_seconds:g} s.",
            page=number,
        )
    return PageTimeout(
        f"Page {number} was not tried: several pages in a row took longer than "
        f"pdf.page_time_limit, {limits.page_time_limit:g} s.",
        page=number,
    )


def page_error(error: ChildFailure, number: int, limits: PdfOptions) -> RagServiceError:
    """Return the error of a page at which the child timed out or died."""
    if isinstance(error, ChildTimeout):
        limit = limits.page_time_limit
        return PageTimeout(
            f"Page {number} took longer than pdf.page_time_limit, {limit:g} s.", page=number
        )
    return PageUnrenderable(f"Page {number} crashed the render process.", page=number)


def failed_page(number: int, error: RagServiceError) -> PlannedPage:
    """Return a page that could not be planned."""
    return PlannedPage(number, PagePlan.OCR, error.code, error=error)


def reason(error: ChildFailure) -> str:
    """Return the end of a sentence about work that the child did not finish."""
    return "took too long" if isinstance(error, ChildTimeout) else "crashed the render process"


def opening_failed(error: ChildFailure, limit: float) -> str:
    """Return the sentence about a file that could not be opened in `limit` seconds."""
    if isinstance(error, ChildTimeout):
        return f"Opening the file took longer than pdf.open_time_limit, {limit:g} s."
    return "Opening the file crashed the render process."
