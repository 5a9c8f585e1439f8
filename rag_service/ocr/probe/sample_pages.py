"""Generated pages of text, no two alike, so that the probe needs no files.

Servers cache their work on a picture, so a repeated page would measure nothing.
"""

from __future__ import annotations

import io
import itertools
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont, ImageFont

_A4_INCHES = 8.27, 11.69
_LINES, _MARGIN = 45, 0.09
_BASES = 8
_QUALITY = 80
_TEXT = (
    "account agreed amount annual article balance between board capital claim clause committee "
    "contract cost court date delivery district during evidence figure following general goods "
    "holder interest invoice issued law letter market measure minutes month notice number office "
    "order paid part party period person plan price project public rate receipt record report "
    "section service share state statement sum table term the title under union value with year"
)


class SamplePages:
    """An endless series of grey A4 pages; `draw` may be called from any thread."""

    def __init__(self, dpi: int) -> None:
        self.width, self.height = (round(side * dpi) for side in _A4_INCHES)
        self._line = self.height * (1 - 2 * _MARGIN) / (_LINES + 2)
        self._font = _font(self._line * 0.62)
        self._bases = [self._base(random.Random(seed)) for seed in range(_BASES)]
        self._numbers = itertools.count(1)
        # So that the next probe of the same server sends no page that it has cached.
        self._series = random.SystemRandom().randrange(10**9)

    def draw(self) -> bytes:
        """Return the next page as a JPEG: one of a few texts under its own number."""
        number = next(self._numbers)
        page = self._bases[number % _BASES].copy()
        self._write(page, 0, f"Page {number} of series {self._series:09d}")
        with io.BytesIO() as file:
            page.save(file, "JPEG", quality=_QUALITY)
            return file.getvalue()

    def _base(self, chance: random.Random) -> Image:
        from PIL import Image

        words = _TEXT.split()
        page = Image.new("L", (self.width, self.height), 255)
        for line in range(2, _LINES + 2):
            self._write(page, line, " ".join(chance.choices(words, k=12)))
        return page

    def _write(self, page: Image, line: int, text: str) -> None:
        from PIL import ImageDraw

        left, top = self.width * _MARGIN, self.height * _MARGIN + line * self._line
        ImageDraw.Draw(page).text((left, top), text, fill=0, font=self._font)


def _font(size: float) -> FreeTypeFont | ImageFont:
    from PIL import ImageFont

    return ImageFont.load_default(size)
