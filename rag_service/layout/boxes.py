"""Converts a model's raw boxes to a page's blocks: in thousandths, without doubles, in order.

Pure functions over boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rag_service.layout.page_layout import Bbox, LayoutBox
from rag_service.layout.reading_order import PlacedPiece, in_reading_order

_SCALE = 1000
# A box with this share of its area inside another belongs to it, or is a second box of its block.
_INSIDE = 0.8
# A picture this large with other blocks on it is the page itself.
_PAGE_AREA = 0.9 * _SCALE * _SCALE
_PICTURES = frozenset({"image", "chart"})
_KEPT_INSIDE = _PICTURES | {"seal"}

# A4 in points: the rules of reading_order.py use points, lines and letters.
_WIDTH, _HEIGHT = 595.0, 842.0
_LINE_HEIGHT, _LETTER_WIDTH = 12.0, 5.0
# Points by which a model's boxes overlap their neighbours.
_MARGIN = 3.0


class _Rectangle(NamedTuple):
    x0: float
    y0: float
    x1: float
    y1: float


def bbox_of(x1: float, y1: float, x2: float, y2: float) -> Bbox | None:
    """Convert corners as shares of the page (0 to 1) to thousandths; None for an empty box."""
    left, top, right, bottom = (
        round(min(max(float(part), 0.0), 1.0) * _SCALE) for part in (x1, y1, x2, y2)
    )
    return (left, top, right, bottom) if left < right and top < bottom else None


def without_overlaps(boxes: Sequence[LayoutBox]) -> list[LayoutBox]:
    """Return the boxes, in the given order, without doubles and those inside another box.

    Of two boxes of one block the one with the higher score is kept; a picture or a seal inside a
    text is kept too.
    """
    blocks = [box for box in boxes if not _is_whole_page(box)] or list(boxes)
    kept: list[LayoutBox] = []
    for box in sorted(blocks, key=lambda box: box.score, reverse=True):
        if not any(_lies_in(box, other) and _lies_in(other, box) for other in kept):
            kept.append(box)
    in_given_order = sorted(kept, key=blocks.index)
    return [box for box in in_given_order if not _belongs_to_another(box, kept)]


def in_order(boxes: Sequence[LayoutBox]) -> list[LayoutBox]:
    """Return the same boxes in reading order: bands, columns, rows."""
    by_rows = [box for row in _rows(boxes) for box in row]
    pieces = [_piece(place, box) for place, box in enumerate(by_rows)]
    return [by_rows[piece.place] for piece in in_reading_order(pieces)]


def area(bbox: Bbox) -> int:
    """Return the area in square thousandths."""
    left, top, right, bottom = bbox
    return (right - left) * (bottom - top)


def _is_whole_page(box: LayoutBox) -> bool:
    return box.label in _PICTURES and area(box.bbox) > _PAGE_AREA


def _belongs_to_another(box: LayoutBox, boxes: Sequence[LayoutBox]) -> bool:
    if box.label in _KEPT_INSIDE:
        return False
    return any(other is not box and _lies_in(box, other) for other in boxes)


def _lies_in(inner: LayoutBox, outer: LayoutBox) -> bool:
    return _shared(inner.bbox, outer.bbox) >= _INSIDE * area(inner.bbox)


def _shared(one: Bbox, other: Bbox) -> int:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(width, 0) * max(height, 0)


def _rows(boxes: Sequence[LayoutBox]) -> list[list[LayoutBox]]:
    """Group boxes of about the same height that are side by side into rows, left to right."""
    rows: list[list[LayoutBox]] = []
    for box in sorted(boxes, key=lambda box: (box.bbox[1], box.bbox[0])):
        if rows and _beside(rows[-1][0].bbox, box.bbox):
            rows[-1].append(box)
        else:
            rows.append([box])
    return [sorted(row, key=lambda box: box.bbox[0]) for row in rows]


def _beside(one: Bbox, other: Bbox) -> bool:
    shared = min(one[3], other[3]) - max(one[1], other[1])
    apart = one[2] <= other[0] or other[2] <= one[0]
    return apart and shared >= max(one[3] - one[1], other[3] - other[1]) / 2


def _piece(place: int, box: LayoutBox) -> PlacedPiece:
    """Return the block, reduced by its margin, with the lines and letters that would fill it."""
    left, right = (box.bbox[i] / _SCALE * _WIDTH for i in (0, 2))
    top, bottom = (box.bbox[i] / _SCALE * _HEIGHT for i in (1, 3))
    lines = max(1, round((bottom - top) / _LINE_HEIGHT))
    letters = int(lines * (right - left) / _LETTER_WIDTH)
    across, down = min(_MARGIN, (right - left) / 4), min(_MARGIN, (bottom - top) / 4)
    place_on_page = _Rectangle(left + across, top + down, right - across, bottom - down)
    return PlacedPiece(place, place_on_page, lines, letters)
