"""Draws PDF pages: as a small grey preview, or for OCR. Runs in the render child."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from PIL import Image

from rag_service.errors import PageTooLarge
from rag_service.pdf.child.ink import PREVIEW_DPI, PREVIEW_PIXELS, PagePreview
from rag_service.pdf.child.mupdf import mupdf, pymupdf
from rag_service.pdf.child.page_colour import has_colour, is_surely_grey
from rag_service.pdf.child.raster import Raster, as_image
from rag_service.pdf.child.scanned_page import draw_scan
from rag_service.pdf.results import PdfWarning

POINTS_PER_INCH = 72
MIN_DPI = 50
# Vision servers refuse very narrow pictures.
MIN_SIDE = 32
# JPEG's own limit.
MAX_SIDE = 65_500


@dataclass(frozen=True, slots=True)
class Resolution:
    """The DPI at which a page is drawn; `capped`: less than was requested."""

    dpi: float
    capped: bool


def preview_of(page: Any) -> PagePreview:
    """Draw a small grey picture of a pymupdf Page, at most PREVIEW_PIXELS."""
    area = max(page.rect.width * page.rect.height, 1e-6)
    scale = min(PREVIEW_DPI / POINTS_PER_INCH, math.sqrt(PREVIEW_PIXELS / area))
    # A page of a few points needs at least one pixel.
    scale = max(scale, 1 / max(min(page.rect.width, page.rect.height), 1e-6))
    preview = PagePreview(_pixels(page.get_displaylist(), scale, pymupdf.csGRAY), scale)
    _forget_pictures()
    return preview


def draw_page(page: Any, number: int, dpi: float, *, max_pixels: int) -> Raster:
    """Draw a pymupdf Page, in grey if it has no colour.

    Raises PageTooLarge if max_pixels would leave under MIN_DPI, and MUPDF_ERRORS.
    """
    resolution = choose_resolution(page.rect.width, page.rect.height, dpi, max_pixels)
    if resolution.capped and resolution.dpi < min(MIN_DPI, dpi):
        inches = (side / POINTS_PER_INCH for side in (page.rect.width, page.rect.height))
        raise PageTooLarge(
            "Page {} measures {:.0f} x {:.0f} inches; pdf.max_pixels would leave under {} DPI."
            .format(number, *inches, MIN_DPI),
            page=number,
        )  # fmt: skip
    return as_raster(_drawn(page, resolution.dpi / POINTS_PER_INCH), number, resolution)


def choose_resolution(width: float, height: float, dpi: float, max_pixels: int) -> Resolution:
    """Return the DPI for a page of that size in points: enough for MIN_SIDE, at most max_pixels."""
    width_in, height_in = max(width, 0.01) / POINTS_PER_INCH, max(height, 0.01) / POINTS_PER_INCH
    wanted = max(dpi, MIN_SIDE / min(width_in, height_in))
    possible = min(
        math.sqrt(max_pixels / (width_in * height_in)), MAX_SIDE / max(width_in, height_in)
    )
    return Resolution(min(wanted, possible), capped=possible < dpi)


def as_raster(image: Image.Image, number: int, resolution: Resolution) -> Raster:
    """Return an RGB or grey picture as a page's raster."""
    grey = image.mode == "L" or not has_colour(image)
    image = _at_least_min_side(image.convert("L") if grey else image)
    dpi = round(resolution.dpi, 1)
    warning = PdfWarning("resolution_capped", f"The page was read at {dpi:g} DPI.", number)
    return Raster(number, image, dpi, (warning,) if resolution.capped else ())


def _at_least_min_side(image: Image.Image) -> Image.Image:
    if min(image.size) >= MIN_SIDE:
        return image
    padded = Image.new(
        image.mode, (max(image.width, MIN_SIDE), max(image.height, MIN_SIDE)), "white"
    )
    padded.paste(image, (0, 0))
    return padded


def _drawn(page: Any, scale: float) -> Image.Image:
    """Draw in RGB, or in grey if that is cheaper and the page certainly has no colour."""
    drawing = page.get_displaylist()
    image = draw_scan(drawing, scale)
    if image is None:
        grey = is_surely_grey(page, drawing)
        image = _pixels(drawing, scale, pymupdf.csGRAY if grey else pymupdf.csRGB)
    _forget_pictures()
    return image


def _pixels(drawing: Any, scale: float, colours: Any) -> Image.Image:
    return as_image(drawing.get_pixmap(pymupdf.Matrix(scale, scale), colours, alpha=0))


def _forget_pictures() -> None:
    """Empty MuPDF's cache of up to 256 MiB of pictures, which no later page shows."""
    mupdf.fz_empty_store()
