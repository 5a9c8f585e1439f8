"""A PDF of some pages of a document, copied or drawn. Runs in the render child.

Pages are copied with PyMuPDF's select(), which keeps layers and forms; inserting pages into a
new file would lose them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_service.pdf.child import preflight
from rag_service.pdf.child.crops import jpeg
from rag_service.pdf.child.mupdf import mupdf, pymupdf
from rag_service.pdf.child.opened_file import OpenedFile
from rag_service.pdf.child.render import POINTS_PER_INCH
from rag_service.pdf.results import PdfWarning

# The reader draws these pages a second time, so little may be lost here.
FINE_QUALITY = 90
# A name drawn by the operator Do (PDF 1.7, 8.8).
_DRAWN = re.compile(
    rb"/([^\x00\t\n\f\r ()<>\[\]{}/%]+)[\x00\t\n\f\r ]+Do(?![^\x00\t\n\f\r /\[(<%])"
)


@dataclass(frozen=True, slots=True)
class DrawnPage:
    """The page `number` that is drawn next, None at the end; the warnings of the page before."""

    number: int | None
    warnings: tuple[PdfWarning, ...] = ()


def select(path: Path, pages: Sequence[int], target: Path) -> bool:
    """Copy pages (from 1) of a PDF unchanged. Return False if that is not possible.

    Raises what preflight.open_pdf raises.
    """
    if preflight.image_type(path) is not None:
        return False
    document = preflight.open_pdf(path, None)
    try:
        document.select([number - 1 for number in pages])
        for page in document:
            _drop_undrawn(document, page)
        document.save(target, garbage=2, encryption=pymupdf.PDF_ENCRYPT_NONE)
        # With a damaged page tree the copy may have more or fewer pages.
        with pymupdf.open(target, filetype="pdf") as written:
            return bool(written.page_count == len(pages))
    except preflight.MUPDF_ERRORS:
        return False
    finally:
        document.close()


def draw(
    source: OpenedFile, pages: Sequence[int], dpi: int, jpeg_quality: int, target: Path
) -> Iterator[DrawnPage]:
    """Draw pages at `dpi` into a PDF; drawn again at that resolution it gives the same pixels.

    Yields before each page, and once before saving. Raises PageUnrenderable, PageTooLarge.
    """
    warnings: tuple[PdfWarning, ...] = ()
    with pymupdf.open() as written:
        for number in pages:
            yield DrawnPage(number, warnings)
            page = source.draw(number, dpi)
            warnings = page.warnings
            width, height = (side * POINTS_PER_INCH / dpi for side in page.image.size)
            new_page = written.new_page(width=width, height=height)
            new_page.insert_image(new_page.rect, stream=jpeg(page.image, jpeg_quality))
        yield DrawnPage(None, warnings)
        written.save(target)


def _drop_undrawn(document: Any, page: Any) -> None:
    """Drop pictures from a page's resources that it does not draw.

    Many scanners give all pages one list of all pictures: a copy of one page would contain all.
    """
    record = mupdf.pdf_lookup_page_obj(mupdf.pdf_document_from_fz_document(document), page.number)
    resources = mupdf.pdf_dict_get_inheritable(record, pymupdf.PDF_NAME("Resources"))
    listed = mupdf.pdf_dict_get(resources, pymupdf.PDF_NAME("XObject"))
    if mupdf.pdf_dict_len(listed) < 2:
        return
    drawn = set(_DRAWN.findall(page.read_contents()))
    kept = _entries(listed, drawn)
    if len(kept) == mupdf.pdf_dict_len(listed) or _may_draw_more(page, kept.values()):
        return
    own = mupdf.pdf_copy_dict(resources)
    pictures = mupdf.pdf_new_dict(mupdf.pdf_get_bound_document(record), len(kept))
    for name, value in kept.items():
        mupdf.pdf_dict_puts(pictures, name, value)
    mupdf.pdf_dict_put(own, pymupdf.PDF_NAME("XObject"), pictures)
    mupdf.pdf_dict_put(record, pymupdf.PDF_NAME("Resources"), own)


def _entries(listed: Any, drawn: set[bytes]) -> dict[str, Any]:
    found = {}
    for index in range(mupdf.pdf_dict_len(listed)):
        name = mupdf.pdf_to_name(mupdf.pdf_dict_get_key(listed, index))
        # A name with an escape can be spelt in several ways, so it is kept.
        if name.encode() in drawn or not name.isalnum():
            found[name] = mupdf.pdf_dict_get_val(listed, index)
    return found


def _may_draw_more(page: Any, kept: Any) -> bool:
    """Return True if a form or a Type 3 font may use the page's resources, having none itself."""
    resources = pymupdf.PDF_NAME("Resources")
    subtype = pymupdf.PDF_NAME("Subtype")
    return any(font[2] == "Type3" for font in page.get_fonts()) or any(
        mupdf.pdf_name_eq(mupdf.pdf_dict_get(each, subtype), pymupdf.PDF_NAME("Form"))
        and not mupdf.pdf_is_dict(mupdf.pdf_dict_get(each, resources))
        for each in kept
    )
