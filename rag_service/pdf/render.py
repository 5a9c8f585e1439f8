"""Draws PDF pages: small and grey to look at, or as JPEG for OCR. Runs in the render child."""

from __future__ import annotations

import math
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from PIL import Image, ImageChops

from rag_service.errors import PageTooLarge
from rag_service.pdf.ink import LOOK_DPI, LOOK_PIXELS, Look
from rag_service.pdf.mupdf import pymupdf
from rag_service.pdf.types import PdfWarning, RenderedPage

POINTS_PER_INCH = 72
MIN_DPI = 50
# Vision servers refuse slivers.
MIN_SIDE = 32
# JPEG's own limit.
MAX_SIDE = 65_500
# A difference between the colour channels below this is a scanner's, not a colour.
COLOUR_LEVEL = 24
COLOUR_SHARE = 0.0002
# Colour is looked for in a picture this many times smaller, which is enough for a stamp.
COLOUR_REDUCTION = 4


@dataclass(frozen=True, slots=True)
class Resolution:
    """The DPI a page will be drawn at; `capped`: less than was asked for."""

    dpi: float
    capped: bool


def look_at(page: Any) -> Look:
    """A small grey picture of a pymupdf Page, at most LOOK_PIXELS."""
    area = max(page.rect.width * page.rect.height, 1e-6)
    scale = min(LOOK_DPI / POINTS_PER_INCH, math.sqrt(LOOK_PIXELS / area))
    # A page of a few points must not shrink to no pixel at all.
    scale = max(scale, 1 / max(min(page.rect.width, page.rect.height), 1e-6))
    return Look(_draw(page, scale, pymupdf.csGRAY), scale)


def render_page(
    page: Any, number: int, dpi: float, *, max_pixels: int, jpeg_quality: int
) -> RenderedPage:
    """A pymupdf Page as a JPEG, grey where it has no colour.

    Raises PageTooLarge where max_pixels would leave under MIN_DPI, and what MuPDF raises.
    """
    resolution = choose_resolution(page.rect.width, page.rect.height, dpi, max_pixels)
    if resolution.capped and resolution.dpi < min(MIN_DPI, dpi):
        inches = (side / POINTS_PER_INCH for side in (page.rect.width, page.rect.height))
        raise PageTooLarge(
            "Page {} measures {:.0f} x {:.0f} inches; pdf.max_pixels would leave under {} DPI."
            .format(number, *inches, MIN_DPI),
            page=number,
        )  # fmt: skip
    image = _draw(page, resolution.dpi / POINTS_PER_INCH, pymupdf.csRGB)
    return encode(image, number, resolution, jpeg_quality)


def choose_resolution(width: float, height: float, dpi: float, max_pixels: int) -> Resolution:
    """DPI for a page of that size in points: enough for MIN_SIDE, at most max_pixels."""
    width_in, height_in = max(width, 0.01) / POINTS_PER_INCH, max(height, 0.01) / POINTS_PER_INCH
    wanted = max(dpi, MIN_SIDE / min(width_in, height_in))
    possible = min(
        math.sqrt(max_pixels / (width_in * height_in)), MAX_SIDE / max(width_in, height_in)
    )
    return Resolution(min(wanted, possible), capped=possible < dpi)


def encode(
    image: Image.Image, number: int, resolution: Resolution, jpeg_quality: int
) -> RenderedPage:
    """An RGB or grey picture as a page's JPEG."""
    grey = image.mode == "L" or not has_colour(image)
    image = _at_least_min_side(image.convert("L") if grey else image)
    jpeg = BytesIO()
    image.save(jpeg, "JPEG", quality=jpeg_quality)
    dpi = round(resolution.dpi, 1)
    warning = PdfWarning("resolution_capped", f"The page was read at {dpi:g} DPI.", number)
    return RenderedPage(
        number, jpeg.getvalue(), image.width, image.height, dpi, grey,
        (warning,) if resolution.capped else (),
    )  # fmt: skip


def has_colour(image: Image.Image) -> bool:
    """True if an RGB picture has more than shades of grey."""
    reduction = COLOUR_REDUCTION if min(image.size) >= MIN_SIDE * COLOUR_REDUCTION else 1
    red, green, blue = image.reduce(reduction).split()
    differences = (ImageChops.difference(green, other) for other in (red, blue))
    few = COLOUR_SHARE * red.width * red.height
    return any(sum(each.histogram()[COLOUR_LEVEL:]) > few for each in differences)


def _at_least_min_side(image: Image.Image) -> Image.Image:
    if min(image.size) >= MIN_SIDE:
        return image
    sheet = Image.new(
        image.mode, (max(image.width, MIN_SIDE), max(image.height, MIN_SIDE)), "white"
    )
    sheet.paste(image, (0, 0))
    return sheet


def _draw(page: Any, scale: float, colours: Any) -> Image.Image:
    pixels = page.get_pixmap(matrix=pymupdf.Matrix(scale, scale), colorspace=colours, alpha=False)
    mode = "L" if pixels.n == 1 else "RGB"
    size = (pixels.width, pixels.height)
    # frombuffer would keep pointing into the pixmap after it is gone; this copies.
    return Image.frombytes(mode, size, pixels.samples_mv, "raw", mode, pixels.stride, 1)
