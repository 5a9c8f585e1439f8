"""A page's pixels, and a cache of the newest, for pages that are read region by region.

Runs in the render child.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from PIL import Image

from rag_service.pdf.results import PdfWarning


@dataclass(frozen=True, slots=True)
class Raster:
    """A page as drawn: an RGB picture, or a grey one; `dpi` is its actual resolution."""

    number: int
    image: Image.Image
    dpi: float
    warnings: tuple[PdfWarning, ...] = ()

    @property
    def grey(self) -> bool:
        return self.image.mode == "L"

    @property
    def bytes(self) -> int:
        return self.image.width * self.image.height * len(self.image.getbands())


class RasterCache:
    """The newest rasters of one document: at most `max_bytes` together, but at least one."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[int, float], Raster] = OrderedDict()

    def get(self, number: int, dpi: float) -> Raster | None:
        """Return the page drawn for that resolution, or None if it is no longer kept."""
        return self._kept.get((number, dpi))

    def keep(self, raster: Raster, dpi: float) -> None:
        """Keep a page; `dpi` is what was requested, which may be more than the raster has."""
        self._kept[raster.number, dpi] = raster
        self._kept.move_to_end((raster.number, dpi))
        while len(self._kept) > 1 and self._bytes() > self._max_bytes:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        """Remove all pages, when another document is opened."""
        self._kept.clear()

    def _bytes(self) -> int:
        return sum(raster.bytes for raster in self._kept.values())


def as_image(pixels: Any) -> Image.Image:
    """Convert a grey or RGB pymupdf Pixmap to a Pillow picture."""
    mode = "L" if pixels.n == 1 else "RGB"
    size = (pixels.width, pixels.height)
    # Copies the samples: frombuffer would still point into the pixmap after it is freed.
    return Image.frombytes(mode, size, pixels.samples_mv, "raw", mode, pixels.stride, 1)
