"""PyMuPDF as a shrinker, and the proof that a shrunk copy shows its original. Render child only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rag_service.pdf.child import ink, preflight
from rag_service.pdf.child.mupdf import mupdf, pymupdf
from rag_service.pdf.child.render import look_at
from rag_service.pdf.results import ShrinkFailed

# Less is gained from pictures that are only a little finer than what they are brought to.
THRESHOLD = 1.1
JPEG_QUALITY = "60"
# Black and white pictures have no grey to keep letters legible, and compress well: as Ghostscript.
BITONAL_DPI, BITONAL_THRESHOLD = 300, 450

# Pixels by which two small pictures of one page may differ in size.
ROUNDING = 2
_PLAIN = {1: "/DeviceGray", 4: "/DeviceCMYK"}


def rewrite_images(path: Path, dpi: int, target: Path) -> None:
    """Write a copy with pictures of at most about `dpi`; raises ShrinkFailed."""
    document = preflight.open_pdf(path, None)
    try:
        _use_plain_colours(document)
        document.rewrite_images(options=_options(dpi))
        document.save(target, garbage=3, deflate=True, encryption=pymupdf.PDF_ENCRYPT_NONE)
    except preflight.MUPDF_ERRORS as error:
        raise ShrinkFailed(
            f"PyMuPDF cannot rewrite the pictures ({_first_line(error)})."
        ) from error
    finally:
        document.close()


def _use_plain_colours(document: Any) -> None:
    """Give grey and CMYK pictures the plain colour space in place of an ICC profile of their own.

    With such a profile on one channel, rewrite_images of MuPDF 1.28 spreads the samples of a row
    over three, and nothing stays legible.
    """
    file = mupdf.pdf_document_from_fz_document(document)
    for xref in range(1, document.xref_length()):
        if document.xref_get_key(xref, "Subtype") != ("name", "/Image"):
            continue
        record = mupdf.pdf_new_indirect(file, xref, 0)
        space = mupdf.pdf_dict_get(record, pymupdf.PDF_NAME("ColorSpace"))
        if mupdf.pdf_name_eq(mupdf.pdf_array_get(space, 0), pymupdf.PDF_NAME("ICCBased")):
            profile = mupdf.pdf_array_get(space, 1)
            plain = _PLAIN.get(mupdf.pdf_dict_get_int(profile, pymupdf.PDF_NAME("N")))
            if plain is not None:
                document.xref_set_key(xref, "ColorSpace", plain)


def _options(dpi: int) -> Any:
    options = mupdf.PdfImageRewriterOptions()
    for kind in ("color_lossless", "color_lossy", "gray_lossless", "gray_lossy"):
        setattr(options, f"{kind}_image_recompress_method", mupdf.FZ_RECOMPRESS_JPEG)
        setattr(options, f"{kind}_image_recompress_quality", JPEG_QUALITY)
        # The other method, AVERAGE, divides by whole numbers and may leave 300 DPI as they are.
        setattr(options, f"{kind}_image_subsample_method", mupdf.FZ_SUBSAMPLE_BICUBIC)
        setattr(options, f"{kind}_image_subsample_threshold", round(dpi * THRESHOLD))
        setattr(options, f"{kind}_image_subsample_to", dpi)
    options.bitonal_image_recompress_method = mupdf.FZ_RECOMPRESS_FAX
    options.bitonal_image_subsample_method = mupdf.FZ_SUBSAMPLE_AVERAGE
    options.bitonal_image_subsample_threshold = BITONAL_THRESHOLD
    options.bitonal_image_subsample_to = BITONAL_DPI
    return options


def compare(original: Path, copy: Path) -> Iterator[int]:
    """Yields each page number once the page is seen to be the same; raises ShrinkFailed."""
    theirs, ours = preflight.open_pdf(original, None), preflight.open_pdf(copy, None)
    if ours.page_count != theirs.page_count:
        raise ShrinkFailed(
            f"The shrunk file has {ours.page_count} pages instead of {theirs.page_count}."
        )
    for number in range(1, theirs.page_count + 1):
        if _lost(theirs, ours, number - 1):
            raise ShrinkFailed(f"The shrunk file lost what page {number} shows.")
        yield number
    theirs.close()
    ours.close()


def _lost(theirs: Any, ours: Any, index: int) -> bool:
    try:
        wanted = look_at(theirs[index]).image
    except preflight.MUPDF_ERRORS:
        # Nobody could see it before.
        return False
    try:
        found = look_at(ours[index]).image
        turned = any(abs(a - b) > ROUNDING for a, b in zip(wanted.size, found.size, strict=True))
        return turned or ink.differs(wanted, found)
    except preflight.MUPDF_ERRORS:
        return True


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
