"""Errors for lack of memory, as MuPDF and Python report them. Runs in the render child."""

from __future__ import annotations

from rag_service.errors import PageTooLarge, RagServiceError
from rag_service.pdf.child.mupdf import mupdf

# "malloc (1099511627776 bytes) failed", also of calloc and realloc.
_SYSTEM_WORD = "alloc"


def is_shortage(error: BaseException) -> bool:
    """Return True if an allocation failed."""
    if isinstance(error, mupdf.FzErrorSystem):
        return _SYSTEM_WORD in str(error)
    return isinstance(error, MemoryError)


def too_large(number: int, max_mib: int) -> RagServiceError:
    """Return the error of a page for which the memory did not suffice."""
    return PageTooLarge(
        f"Page {number} needs more memory than pdf.child_max_mib, {max_mib} MiB.", page=number
    )
