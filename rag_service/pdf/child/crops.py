"""Pages and their regions as JPEGs, in the sizes that the models need. Runs in the render child."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

from PIL import Image

from rag_service.pdf.child.raster import Raster
from rag_service.pdf.results import Crop, PagePicture, RenderedPage

if TYPE_CHECKING:
    from rag_service.layout.page_layout import Bbox

# The side in pixels of one token of GLM-OCR: two by two patches of 14 pixels.
TOKEN_SIDE = 28
# Layout models scale a page to at most 800 pixels a side, whatever its shape.
LAYOUT_SIDE, LAYOUT_LONG_SIDE = 800, 1600
BBOX_UNITS = 1000
# Encoding releases the GIL; a page has too few regions for more than a few threads.
MOST_THREADS = 4


@dataclass(frozen=True, slots=True)
class CropSize:
    """Bounds of a crop: the fewest pixels of its area, the most of its longer side."""

    min_pixels: int
    max_side: int


class Cutter:
    """Cuts regions out of pages and encodes them, the regions of a page in parallel."""

    def __init__(self, bounds: CropSize, jpeg_quality: int) -> None:
        self._bounds = bounds
        self._quality = jpeg_quality
        self._threads = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1))

    def for_ocr(self, page: Raster, boxes: Sequence[Bbox]) -> list[Crop]:
        """Return the regions in the sizes that `fit` gives."""
        return self._cut(page, boxes, lambda width, height: fit(width, height, self._bounds))

    def unscaled(self, page: Raster, boxes: Sequence[Bbox]) -> list[Crop]:
        """Return the regions in the page's own pixels."""
        return self._cut(page, boxes, lambda width, height: (width, height))

    def _cut(
        self, page: Raster, boxes: Sequence[Bbox], size_of: Callable[[int, int], tuple[int, int]]
    ) -> list[Crop]:
        def cut_one(box: Bbox) -> Crop:
            part = page.image.crop(pixels_of(box, page.image.size))
            size = size_of(*part.size)
            if size != part.size:
                part = part.resize(size, Image.Resampling.BICUBIC)
            return Crop(jpeg(part, self._quality), *size)

        return list(self._threads.map(cut_one, boxes))


def fit(width: int, height: int, bounds: CropSize) -> tuple[int, int]:
    """Return the nearest sides that are multiples of TOKEN_SIDE and within the bounds.

    Rounds as the glmocr SDK 0.1.5 does; its minimum of 12,544 pixels counts each pixel twice.
    """
    shrink = min(1.0, bounds.max_side / max(width, height))
    sides = [round(side * shrink / TOKEN_SIDE) * TOKEN_SIDE for side in (width, height)]
    if math.prod(sides) < bounds.min_pixels:
        grow = math.sqrt(bounds.min_pixels / (width * height))
        sides = [math.ceil(side * grow / TOKEN_SIDE) * TOKEN_SIDE for side in (width, height)]
    longest = bounds.max_side // TOKEN_SIDE * TOKEN_SIDE
    return min(sides[0], longest), min(sides[1], longest)


def pixels_of(box: Bbox, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Convert a box in thousandths to pixels of a page, rounded down as the SDK; never empty."""
    width, height = size
    left, top = box[0] * width // BBOX_UNITS, box[1] * height // BBOX_UNITS
    right, bottom = box[2] * width // BBOX_UNITS, box[3] * height // BBOX_UNITS
    return left, top, max(right, left + 1), max(bottom, top + 1)


def whole_page(page: Raster, jpeg_quality: int) -> RenderedPage:
    """Return the page in its own pixels."""
    return RenderedPage(
        page.number, jpeg(page.image, jpeg_quality), *page.image.size, page.dpi, page.grey,
        page.warnings,
    )  # fmt: skip


def for_layout(page: Raster, jpeg_quality: int) -> PagePicture:
    """Return a small picture of the page together with the page's own size."""
    width, height = page.image.size
    scale = min(LAYOUT_SIDE / min(width, height), LAYOUT_LONG_SIDE / max(width, height))
    small = page.image
    if scale < 1:
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        # Softer pictures lose boxes: bilinear found 177 on 35 pages of the corpus, not 187.
        small = small.resize(size, Image.Resampling.BICUBIC)
    return PagePicture(
        page.number, jpeg(small, jpeg_quality), width, height, page.dpi, page.grey, page.warnings
    )


def jpeg(image: Image.Image, quality: int) -> bytes:
    """Encode an RGB or grey picture as a JPEG."""
    out = BytesIO()
    image.save(out, "JPEG", quality=quality)
    return out.getvalue()
