"""Pages that draw one JPEG and nothing else, as scanners make them. Runs in the render child.

MuPDF decodes a JPEG in full and in colour before it shrinks it. Pillow, with libjpeg-turbo,
decodes it directly at about the wanted size, and in grey if it has no colour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from PIL import Image

from rag_service.pdf.child.mupdf import mupdf, pymupdf
from rag_service.pdf.child.page_colour import REDUCTION, shows_colour
from rag_service.pdf.child.raster import as_image

_MODES = {1: "L", 3: "RGB"}
# Larger pictures are drawn by MuPDF.
_MOST_PIXELS = 80_000_000
# What Pillow raises on damaged files.
_BAD_JPEG = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
# Points by which a clip may cut into a picture because of rounding.
_ROUNDING = 0.1
# The device calls that draw something or change what is drawn.
_DRAWING_CALLS = (
    "fill_path", "stroke_path", "fill_text", "stroke_text", "fill_shade", "fill_image_mask",
    "clip_stroke_path", "clip_text", "clip_stroke_text", "clip_image_mask",
    "begin_mask", "begin_group", "begin_tile",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scan:
    """The only thing that a page draws: a JPEG with grey or RGB samples, placed by `matrix`.

    `plain`: the samples are DeviceGray or DeviceRGB, without an ICC profile.
    """

    jpeg: bytes
    mode: str
    plain: bool
    matrix: Any

    def decode(self, scale: float) -> Image.Image | None:
        """Return the picture, grey if possible, at about its size at `scale` pixels a point.

        None if its colours need an ICC profile. Raises what Pillow raises.
        """
        matrix = self.matrix
        width = math.hypot(matrix.a, matrix.b) * scale
        height = math.hypot(matrix.c, matrix.d) * scale
        if self.mode == "L" or not shows_colour(
            self._decode("RGB", width / REDUCTION, height / REDUCTION)
        ):
            return self._decode("L", width, height)
        return self._decode("RGB", width, height) if self.plain else None

    def _decode(self, mode: str, width: float, height: float) -> Image.Image:
        file = Image.open(BytesIO(self.jpeg), formats=["JPEG"])
        # Picks the smallest size that libjpeg can decode to and that is at least this large.
        file.draft(mode, (max(1, int(width)), max(1, int(height))))
        file.load()
        return file


def draw_scan(drawing: Any, scale: float) -> Image.Image | None:
    """Draw a page that is nothing but a JPEG, at `scale` pixels a point; None for other pages.

    `drawing` is the page's pymupdf DisplayList.
    """
    try:
        scan = find_scan(drawing)
        picture = scan.decode(scale) if scan is not None else None
    except _BAD_JPEG:
        # MuPDF draws the readable part of a damaged JPEG.
        return None
    return _placed(picture, scan.matrix, drawing, scale) if scan and picture else None


def find_scan(drawing: Any) -> Scan | None:
    """Return the JPEG that is all that a page draws, or None. Raises what Pillow raises."""
    finder = _PictureFinder(mupdf.fz_bound_display_list(drawing.this))
    everywhere = mupdf.FzRect(mupdf.FzRect.Fixed_INFINITE)
    mupdf.fz_run_display_list(drawing.this, finder, mupdf.FzMatrix(), everywhere, finder.cookie)
    mupdf.fz_close_device(finder)
    image = finder.image
    if finder.stopped or image is None or not _is_simple(image):
        return None
    compressed = mupdf.ll_fz_compressed_image_buffer(image)
    if compressed is None or compressed.params.type != mupdf.FZ_IMAGE_JPEG:
        return None
    jpeg = bytes(mupdf.ll_fz_buffer_to_bytes_internal(compressed.buffer, 0))
    if not _matches(jpeg, image):
        return None
    plain = bool(mupdf.ll_fz_colorspace_is_device(image.colorspace))
    return Scan(jpeg, _MODES[image.n], plain, finder.matrix)


class _PictureFinder(mupdf.FzDevice2):  # type: ignore[misc]
    """A device that keeps the one picture of a page and stops if anything else is drawn."""

    def __init__(self, page: Any) -> None:
        super().__init__()
        for call in ("fill_image", "clip_path", *_DRAWING_CALLS):
            getattr(self, f"use_virtual_{call}")()
        self.cookie = mupdf.FzCookie()
        self.stopped = False
        # Valid only while the display list exists.
        self.image: Any = None
        self.matrix: Any = None
        self._page = page
        self._clips: list[Any] = []

    def fill_image(self, _context: Any, image: Any, matrix: Any, alpha: float, _: Any) -> None:
        self.matrix = mupdf.FzMatrix(matrix)
        shown = mupdf.fz_intersect_rect(
            mupdf.fz_transform_rect(mupdf.FzRect(mupdf.FzRect.Fixed_UNIT), self.matrix), self._page
        )
        clipped = not all(_contains(clip, shown) for clip in self._clips)
        if self.image is not None or alpha != 1 or clipped:
            self._stop()
        self.image = image

    def clip_path(self, _context: Any, path: Any, _rule: int, matrix: Any, _area: Any) -> None:
        if mupdf.ll_fz_path_is_rect(path, matrix):
            self._clips.append(mupdf.FzRect(mupdf.ll_fz_bound_path(path, None, matrix)))
        else:
            self._stop()

    def _stop(self, *_: Any) -> None:
        self.stopped = True
        self.cookie.m_internal.abort = 1


for _call in _DRAWING_CALLS:
    setattr(_PictureFinder, _call, _PictureFinder._stop)


def _contains(clip: Any, shown: Any) -> bool:
    return bool(
        clip.x0 - _ROUNDING <= shown.x0 and clip.y0 - _ROUNDING <= shown.y0
        and clip.x1 + _ROUNDING >= shown.x1 and clip.y1 + _ROUNDING >= shown.y1
    )  # fmt: skip


def _is_simple(image: Any) -> bool:
    """Return True for a grey or RGB picture that is not too large and has no colour mapping."""
    colours = image.colorspace
    return (
        colours is not None
        and bool(mupdf.ll_fz_colorspace_is_gray(colours) or mupdf.ll_fz_colorspace_is_rgb(colours))
        and image.w * image.h <= _MOST_PIXELS
        and not (image.use_colorkey or image.use_decode)
    )


def _matches(jpeg: bytes, image: Any) -> bool:
    """Return True if the JPEG has the size and the colours that the PDF gives."""
    with Image.open(BytesIO(jpeg), formats=["JPEG"]) as file:
        # Without either marker the PDF may define how colours are stored, which is unknown here.
        certain = image.n == 1 or "jfif" in file.info or "adobe_transform" in file.info
        return certain and (file.mode, file.size) == (_MODES[image.n], (image.w, image.h))


def _placed(picture: Image.Image, matrix: Any, drawing: Any, scale: float) -> Image.Image:
    """Draw the page, white with the picture on it, with MuPDF."""
    colours = pymupdf.csGRAY if picture.mode == "L" else pymupdf.csRGB
    samples = pymupdf.Pixmap(colours, *picture.size, picture.tobytes(), False)
    image = mupdf.fz_new_image_from_pixmap(samples.this, mupdf.FzImage())
    to_pixels = mupdf.fz_scale(scale, scale)
    area = mupdf.fz_transform_rect(mupdf.fz_bound_display_list(drawing.this), to_pixels)
    pixels = mupdf.fz_new_pixmap_with_bbox(
        colours.this, mupdf.fz_round_rect(area), mupdf.FzSeparations(), 0
    )
    mupdf.fz_clear_pixmap_with_value(pixels, 255)
    device = mupdf.fz_new_draw_device(to_pixels, pixels)
    mupdf.fz_fill_image(device, image, matrix, 1, mupdf.FzColorParams())
    mupdf.fz_close_device(device)
    return as_image(pymupdf.Pixmap("raw", pixels))
