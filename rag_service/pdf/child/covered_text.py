"""Pictures under text: how much of a page they cover and how much text they hide.

Runs in the render child.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rag_service.pdf.child.extraction import PageContent, PdfBox

COVERED_SHARE = 0.60
# Scanners cut pages into strips and tiles, so coverage is counted on a grid, not by picture.
_CELLS = 32
_IGNORED_TEXT = 3
_PICTURE_KINDS = ("fill-image", "fill-imgmask")


def covers_page(pictures: Sequence[PdfBox], width: float, height: float) -> bool:
    """Return True if the pictures together cover most of a page of that size in points."""
    return _coverage(pictures, width, height) >= COVERED_SHARE


def hidden_share(page: Any, content: PageContent) -> float:
    """Return the share, 0 to 1, of the text's width that is invisible or under a page-wide picture.

    `page` is a pymupdf Page. Text of render mode 3 is what OCR programs put over a scan.
    """
    cover = _last_cover(page, content)
    total = hidden = 0.0
    for span in page.get_texttrace():
        x0, y0, x1, y1 = span["bbox"]
        length = max(x1 - x0, y1 - y0)
        total += length
        if span["type"] == _IGNORED_TEXT or span["opacity"] == 0 or span["seqno"] < cover:
            hidden += length
    return hidden / total if total else 0.0


def _coverage(pictures: Sequence[PdfBox], width: float, height: float) -> float:
    if not pictures or width <= 0 or height <= 0:
        return 0.0
    rows = [0] * _CELLS
    for box in pictures:
        left, right = (_cell(x, width) for x in (box.x0, box.x1))
        top, bottom = (_cell(y, height) for y in (box.y0, box.y1))
        mask = (1 << right) - (1 << left) if right > left else 0
        for row in range(top, bottom):
            rows[row] |= mask
    return sum(row.bit_count() for row in rows) / _CELLS**2


def _cell(position: float, length: float) -> int:
    return max(0, min(_CELLS, round(position / length * _CELLS)))


def _last_cover(page: Any, content: PageContent) -> int:
    """Sequence number of the drawing step by which pictures covered the page; 0 if none did."""
    # The log's coordinates are those before /Rotate.
    turned = page.rotation % 180 != 0
    width, height = content.width, content.height
    size = (height, width) if turned else (width, height)
    drawn: list[PdfBox] = []
    for number, (kind, bounds) in enumerate(page.get_bboxlog()):
        if kind in _PICTURE_KINDS:
            drawn.append(PdfBox(*bounds))
            if covers_page(drawn, *size):
                return number
    return 0
