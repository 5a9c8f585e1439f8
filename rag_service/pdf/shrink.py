"""Shrinks a PDF by making its pictures coarser, with Ghostscript or else with PyMuPDF.

The result is a picture for OCR and never a source of text: shrinkers damage text layers.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rag_service.errors import ProcessInTrouble, RagServiceError
from rag_service.pdf import ghostscript
from rag_service.pdf.session import PdfSession
from rag_service.runtime.process_resources import require_resources

log = logging.getLogger(__name__)

# A whole document never gets this small; what Ghostscript writes for an unreadable file does.
SMALLEST_BYTES = 50 * 1024
MISSING = (
    "Ghostscript (gs) is not installed: scans too large for a job are shrunk by PyMuPDF instead."
)


class Shrinker(StrEnum):
    GHOSTSCRIPT = "ghostscript"
    PYMUPDF = "pymupdf"


@dataclass(frozen=True, slots=True)
class ShrinkResult:
    """The file to use: the shrunk one, or the original if `shrinker` is None.

    `fell_back`: Ghostscript was missing, broken or slow. `reason`: why it fell back, or why the
    original is used.
    """

    path: Path
    shrinker: Shrinker | None
    fell_back: bool
    reason: str


def shrinkers_available() -> tuple[Shrinker, ...]:
    """Return the usable shrinkers, best first; PyMuPDF is always there."""
    first = () if ghostscript.find() is None else (Shrinker.GHOSTSCRIPT,)
    return (*first, Shrinker.PYMUPDF)


def warn_of_missing_shrinker() -> None:
    """Log a warning if Ghostscript is missing, at the start of a process that sends jobs."""
    if Shrinker.GHOSTSCRIPT not in shrinkers_available():
        log.warning(MISSING)


async def shrink(
    pdf: PdfSession, source: Path, dpi: int, target: Path, time_limit: float
) -> ShrinkResult:
    """Write a copy of a PDF with pictures of about `dpi`, 150 or 100, to `target`. Never raises.

    `time_limit` is in seconds and applies to each shrinker. A copy is not used unless it was
    compared with the original page by page and is smaller.
    """
    by_ghostscript = ghostscript.rewrite(source, dpi, target, time_limit, pdf.max_mib)
    fault = await _fault(by_ghostscript, pdf, source, target)
    if fault is None:
        return _smaller(source, target, Shrinker.GHOSTSCRIPT)
    log.warning("%s; PyMuPDF shrinks instead.", fault)
    second = await _fault(pdf.rewrite_images(source, dpi, target, time_limit), pdf, source, target)
    if second is None:
        return _smaller(source, target, Shrinker.PYMUPDF, fault)
    log.warning("Nothing was shrunk: %s; %s.", fault, second)
    return ShrinkResult(source, None, fell_back=True, reason=f"{fault}; {second}")


async def _fault(work: Awaitable[None], pdf: PdfSession, source: Path, target: Path) -> str | None:
    """Await a shrinker. Return why its file cannot be used, or None if it shows the same pages."""
    try:
        await work
        size = target.stat().st_size
        if size < SMALLEST_BYTES <= source.stat().st_size:
            return f"The shrunk file has only {size} bytes"
        await pdf.compare(source, target)
    except ProcessInTrouble:
        raise
    except RagServiceError as error:
        return error.message.rstrip(".")
    except Exception as error:
        require_resources(error)
        # The original is still there, so no error may fail the run.
        log.exception("A shrinker failed.")
        return f"The shrinker failed ({type(error).__name__})"
    return None


def _smaller(source: Path, target: Path, shrinker: Shrinker, first_fault: str = "") -> ShrinkResult:
    fell_back = bool(first_fault)
    if target.stat().st_size >= source.stat().st_size:
        reasons = [first_fault, "the file does not get smaller"]
        return ShrinkResult(source, None, fell_back, "; ".join(filter(None, reasons)))
    return ShrinkResult(target, shrinker, fell_back, first_fault)
