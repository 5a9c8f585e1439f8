"""Detects colour on a page, by what it draws if that is certain, else by its pixels.

Runs in the render child.
"""

from __future__ import annotations

import contextlib
from typing import Any

from PIL import Image, ImageChops

from rag_service.pdf.child.mupdf import mupdf

# A smaller difference between the colour channels is a scanner's noise.
LEVEL = 24
SHARE = 0.0002
# Colour is searched in a picture that is this many times smaller; a stamp is still found.
REDUCTION = 4
_SMALLEST_REDUCED = 128
# The threshold of fz_new_test_device (fitz/device.h): a smaller difference is not visible.
_THRESHOLD = 0.02


def is_surely_grey(page: Any, drawing: Any) -> bool:
    """Return True if all that a pymupdf Page draws is black, white or grey by its colour space.

    `drawing` is its DisplayList; no picture is decoded.
    """
    # Glyphs of a Type 3 font may have a colour of their own, which MuPDF's test does not see.
    if any(font[2] == "Type3" for font in page.get_fonts()):
        return False
    found = mupdf.ll_fz_new_test_device_outparams()
    device = mupdf.FzDevice(mupdf.ll_fz_new_test_device_outparams_fn(_THRESHOLD, 0, None, found))
    everywhere = mupdf.FzRect(mupdf.FzRect.Fixed_INFINITE)
    # The device stops at the first colour.
    with contextlib.suppress(mupdf.FzErrorAbort):
        mupdf.fz_run_display_list(
            drawing.this, device, mupdf.FzMatrix(), everywhere, mupdf.FzCookie()
        )
        mupdf.fz_close_device(device)
    return bool(found.is_color == 0)


def has_colour(image: Image.Image) -> bool:
    """Return True if an RGB picture has more than shades of grey."""
    return shows_colour(image.reduce(REDUCTION) if min(image.size) >= _SMALLEST_REDUCED else image)


def shows_colour(small: Image.Image) -> bool:
    """Return True if a picture, already REDUCTION times smaller, has more than shades of grey."""
    red, green, blue = small.split()
    differences = (ImageChops.difference(green, other) for other in (red, blue))
    few = SHARE * red.width * red.height
    return any(sum(each.histogram()[LEVEL:]) > few for each in differences)
