"""PyMuPDF as a shrinker, and the comparison of a shrunk copy with its original.

Runs in the render child.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rag_service.pdf.child import ink, preflight
from rag_service.pdf.child.mupdf import mupdf, pymupdf
from rag_service.pdf.child.render import preview_of
from rag_service.pdf.results import ShrinkFailed

# Shrinking pictures that are only a little finer than the target gains nothing.
THRESHOLD = 1.1
JPEG_QUALITY = "60"
# As Ghostscript: black and white pictures have no grey that keeps letters legible at less.
BITONAL_DPI, BITONAL_THRESHOLD = 300, 450

# Pixels by which two small pictures of one page may differ in size.
ROUNDING = 2
_PLAIN = {1: "/DeviceGray", 4: "/DeviceCMYK"}


def rewrite_images(path: Path, dpi: int, target: Path) -> None:
    """Write a copy with pictures of at most about `dpi`. Raises ShrinkFailed."""
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
    """Give grey and CMYK pictures the plain colour space instead of their own ICC profile.

    With such a profile on one channel, rewrite_images of MuPDF 1.28 spreads the samples of a row
    over three channels, and nothing stays legible.
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
        # The other method, AVERAGE, divides by whole numbers and may leave 300 DPI unchanged.
        setattr(options, f"{kind}_image_subsample_method", mupdf.FZ_SUBSAMPLE_BICUBIC)
        setattr(options, f"{kind}_image_subsample_threshold", round(dpi * THRESHOLD))
        setattr(options, f"{kind}_image_subsample_to", dpi)
    options.bitonal_image_recompress_method = mupdf.FZ_RECOMPRESS_FAX
    options.bitonal_image_subsample_method = mupdf.FZ_SUBSAMPLE_AVERAGE
    options.bitonal_image_subsample_threshold = BITONAL_THRESHOLD
    options.bitonal_image_subsample_to = BITONAL_DPI
    return options


def compare(original: Path, copy: Path) -> Iterator[int]:
    """Yield each page number after its comparison. Raises ShrinkFailed at the first difference."""
    before, after = preflight.open_pdf(original, None), preflight.open_pdf(copy, None)
    if after.page_count != before.page_count:
        raise ShrinkFailed(
            f"The shrunk file has {after.page_count} pages instead of {before.page_count}."
        )
    for number in range(1, before.page_count + 1):
        if _is_lost(before, after, number - 1):
            raise ShrinkFailed(f"The shrunk file lost what page {number} shows.")
        yield number
    before.close()
    after.close()


def _is_lost(before: Any, after: Any, index: int) -> bool:
    try:
        wanted = preview_of(before[index]).image
    except preflight.MUPDF_ERRORS:
        # The original cannot be drawn either.
        return False
    try:
        found = preview_of(after[index]).image
        turned = any(abs(a - b) > ROUNDING for a, b in zip(wanted.size, found.size, strict=True))
        return turned or ink.differs(wanted, found)
    except preflight.MUPDF_ERRORS:
        return True


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
