"""A page of our own with a few large words, sent when a server's answers are in doubt.

A server that works gives some text for it, whatever is wrong with the page in doubt.
"""

from __future__ import annotations

import io
import math
from functools import lru_cache

WORDS = ("HARBOUR", "LANTERN", "MEADOW", "COPPER")
# The comment in its JPEG, by which a stand-in for a server can tell the page.
COMMENT = b"rag_service known page"

_A4_INCHES = 8.27, 11.69
# Smaller pictures may not be legible.
_LEAST_PIXELS = 400 * 566
_ROUND_TO = 28
_LETTER_SHARE, _QUALITY = 0.8, 80


def known_page_size(pixels: int, dpi: int) -> tuple[int, int]:
    """Return width and height of the page for a picture in doubt with this many pixels.

    It has the shape of A4 and about the same area, so that a server without memory for the
    picture has none for the page. It is not larger than A4 at `dpi`: a server may refuse an
    unusual page for its size alone.
    """
    width, height = (side * dpi for side in _A4_INCHES)
    area = min(width * height, max(pixels, _LEAST_PIXELS))
    scale = math.sqrt(area / (width * height))
    return _rounded(width * scale), _rounded(height * scale)


def _rounded(side: float) -> int:
    return max(1, round(side / _ROUND_TO)) * _ROUND_TO


@lru_cache(maxsize=8)
def known_page(width: int, height: int) -> bytes:
    """Return the page as a JPEG of this size in pixels, one word below the other."""
    from PIL import Image, ImageDraw, ImageFont

    page = Image.new("L", (width, height), 255)
    pen = ImageDraw.Draw(page)
    longest = max(map(len, WORDS))
    font = ImageFont.load_default(_LETTER_SHARE * width / longest)
    for index, word in enumerate(WORDS):
        place = (width / 2, (index + 0.5) * height / len(WORDS))
        pen.text(place, word, fill=0, font=font, anchor="mm")
    with io.BytesIO() as file:
        page.save(file, "JPEG", quality=_QUALITY, comment=COMMENT)
        return file.getvalue()
