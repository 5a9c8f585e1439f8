"""Has a page colour? Told by what it draws where that is certain, else by its pixels.

Runs in the render child.
"""

from __future__ import annotations

import contextlib
from typing import Any

from PIL import Image, ImageChops

from rag_service.pdf.child.mupdf import mupdf

# A difference between the colour channels below this is a scanner's, not a colour.
LEVEL = 24
SHARE = 0.0002
# Colour is looked for in a picture this many times smaller, which is enough for a stamp.
REDUCTION = 4
_SMALLEST_REDUCED = 128
# MuPDF's word for a difference that nobody sees (fitz/device.h, fz_new_test_device).
_SLOP = 0.02


def is_surely_grey(page: Any, drawing: Any) -> bool:
    """True if all that a pymupdf Page draws is black, white or grey by its colour space.

    `drawing` is its DisplayList; no picture is decoded.
    """
    # Glyphs of a Type 3 font may bring a colour of their own, unseen by MuPDF's test.
    if any(font[2] == "Type3" for font in page.get_fonts()):
        return False
    found = mupdf.ll_fz_new_test_device_outparams()
    device = mupdf.FzDevice(mupdf.ll_fz_new_test_device_outparams_fn(_SLOP, 0, None, found))
    everywhere = mupdf.FzRect(mupdf.FzRect.Fixed_INFINITE)
    # The device stops at the first colour.
    with contextlib.suppress(mupdf.FzErrorAbort):
        mupdf.fz_run_display_list(
            drawing.this, device, mupdf.FzMatrix(), everywhere, mupdf.FzCookie()
        )
        mupdf.fz_close_device(device)
    return bool(found.is_color == 0)


def has_colour(image: Image.Image) -> bool:
    """True if an RGB picture has more than shades of grey."""
    return shows_colour(image.reduce(REDUCTION) if min(image.size) >= _SMALLEST_REDUCED else image)


def shows_colour(small: Image.Image) -> bool:
    """True if a picture that is already REDUCTION times smaller has more than shades of grey."""
    red, green, blue = small.split()
    differences = (ImageChops.difference(green, other) for other in (red, blue))
    few = SHARE * red.width * red.height
    return any(sum(each.histogram()[LEVEL:]) > few for each in differences)
