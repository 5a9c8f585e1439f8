"""Ink on a page, found in a small grey preview. Runs in the render child."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from PIL import Image, ImageChops, ImageDraw

from rag_service.pdf.child.extraction import PdfBox

PREVIEW_DPI = 72
PREVIEW_PIXELS = 1_000_000
# Grey levels (of 255) from the paper: what may be visible, and what is certainly drawn.
FAINT = 16
DARK = 48
# Share of a page's sides that is ignored: scanners leave dark edges.
MARGIN = 0.03
# Points around a text box for ascenders, skew and the blur of a scan.
REACH = 3.0
INK_SHARE = 0.004
# How much a copy may differ, as a share of how much the page differs from an empty page: real
# files at 100 DPI reach 0.55, an empty copy has 1, damaged ones about 3.
DIFFERENT_SHARE = 0.7
# Grey levels per pixel by which even a page without ink may differ.
_SPECKS = 0.05


@dataclass(frozen=True, slots=True)
class PagePreview:
    """A small grey picture of a page and its scale in pixels a point."""

    image: Image.Image
    scale: float


def is_blank(image: Image.Image) -> bool:
    """Return True if no pixel of a grey picture differs visibly from the rest."""
    low, high = cast(tuple[int, int], image.getextrema())
    return high - low <= FAINT


def has_ink_outside(preview: PagePreview, boxes: Iterable[PdfBox]) -> bool:
    """Return True if something is drawn outside the text boxes, as on a scan with a typed stamp."""
    image = preview.image.copy()
    paper = _paper(image)
    draw = ImageDraw.Draw(image)
    for box in boxes:
        edges = (box.x0 - REACH, box.y0 - REACH, box.x1 + REACH, box.y1 + REACH)
        draw.rectangle(tuple(edge * preview.scale for edge in edges), fill=paper)
    edge_x, edge_y = int(image.width * MARGIN), int(image.height * MARGIN)
    inner = image.crop((edge_x, edge_y, image.width - edge_x, image.height - edge_y))
    return _ink(inner, paper) > INK_SHARE * inner.width * inner.height


def differs(original: Image.Image, copy: Image.Image) -> bool:
    """Return True if a grey copy of a page does not show what the original shows."""
    if copy.size != original.size:
        copy = copy.resize(original.size)
    empty = Image.new("L", original.size, _paper(original))
    shown, changed = (_distance(original, other) for other in (empty, copy))
    return changed > DIFFERENT_SHARE * max(shown, _SPECKS * original.width * original.height)


def _distance(one: Image.Image, other: Image.Image) -> int:
    """Return the sum of all visible differences; those of resampling and JPEG are smaller."""
    histogram = ImageChops.difference(one, other).histogram()
    return sum(level * count for level, count in enumerate(histogram) if level > FAINT)


def _paper(image: Image.Image) -> int:
    histogram = image.histogram()
    return histogram.index(max(histogram))


def _ink(image: Image.Image, paper: int) -> int:
    histogram = image.histogram()
    return sum(histogram[: max(0, paper - DARK)]) + sum(histogram[paper + DARK + 1 :])
