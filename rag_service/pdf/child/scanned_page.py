"""Pages that are one JPEG and nothing else, as scanners make them. Runs in the render child.

MuPDF decodes a JPEG in full and in colour before it makes it smaller. libjpeg-turbo, by way of
Pillow, decodes it at the size that is wanted, without its colours where they say nothing.
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
# Larger ones are left to MuPDF, as is all that is not plain.
_MOST_PIXELS = 80_000_000
# What Pillow raises on damaged files.
_BAD_JPEG = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
# Points by which a clip may seem to cut into a picture, by rounding.
_ROUNDING = 0.1
# What a device is asked to do that leaves a mark or changes one.
_MARKS = (
    "fill_path", "stroke_path", "fill_text", "stroke_text", "fill_shade", "fill_image_mask",
    "clip_stroke_path", "clip_text", "clip_stroke_text", "clip_image_mask",
    "begin_mask", "begin_group", "begin_tile",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scan:
    """The only thing a page draws: a JPEG with grey or RGB samples, put in place by `matrix`.

    `plain`: the samples are DeviceGray or DeviceRGB, without a profile of their own.
    """

    jpeg: bytes
    mode: str
    plain: bool
    matrix: Any

    def decode(self, scale: float) -> Image.Image | None:
        """A picture about as large as it is drawn at `scale` pixels a point, grey if it can be.

        None where its colours need a profile. Raises what Pillow raises.
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
        # The smallest of the sizes libjpeg can decode to that is no smaller than this one.
        file.draft(mode, (max(1, int(width)), max(1, int(height))))
        file.load()
        return file


def draw_scan(drawing: Any, scale: float) -> Image.Image | None:
    """A page that is nothing but a JPEG, at `scale` pixels a point; None for any other page.

    `drawing` is the page's pymupdf DisplayList.
    """
    try:
        scan = find_scan(drawing)
        picture = scan.decode(scale) if scan is not None else None
    except _BAD_JPEG:
        # MuPDF shows what there is of it.
        return None
    return _placed(picture, scan.matrix, drawing, scale) if scan and picture else None


def find_scan(drawing: Any) -> Scan | None:
    """The JPEG that is all a page draws, where it is a plain one. Raises what Pillow raises."""
    watch = _Watch(mupdf.fz_bound_display_list(drawing.this))
    everywhere = mupdf.FzRect(mupdf.FzRect.Fixed_INFINITE)
    mupdf.fz_run_display_list(drawing.this, watch, mupdf.FzMatrix(), everywhere, watch.cookie)
    mupdf.fz_close_device(watch)
    image = watch.image
    if watch.stopped or image is None or not _is_simple(image):
        return None
    compressed = mupdf.ll_fz_compressed_image_buffer(image)
    if compressed is None or compressed.params.type != mupdf.FZ_IMAGE_JPEG:
        return None
    jpeg = bytes(mupdf.ll_fz_buffer_to_bytes_internal(compressed.buffer, 0))
    if not _says_the_same(jpeg, image):
        return None
    plain = bool(mupdf.ll_fz_colorspace_is_device(image.colorspace))
    return Scan(jpeg, _MODES[image.n], plain, watch.matrix)


class _Watch(mupdf.FzDevice2):  # type: ignore[misc]
    """A device that notes the one picture of a page and stops at whatever else is drawn."""

    def __init__(self, page: Any) -> None:
        super().__init__()
        for call in ("fill_image", "clip_path", *_MARKS):
            getattr(self, f"use_virtual_{call}")()
        self.cookie = mupdf.FzCookie()
        self.stopped = False
        # Valid as long as the display list that is run.
        self.image: Any = None
        self.matrix: Any = None
        self._page = page
        self._clips: list[Any] = []

    def fill_image(self, _context: Any, image: Any, matrix: Any, alpha: float, _: Any) -> None:
        self.matrix = mupdf.FzMatrix(matrix)
        shown = mupdf.fz_intersect_rect(
            mupdf.fz_transform_rect(mupdf.FzRect(mupdf.FzRect.Fixed_UNIT), self.matrix), self._page
        )
        if self.image is not None or alpha != 1 or not all(_holds(c, shown) for c in self._clips):
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


for _mark in _MARKS:
    setattr(_Watch, _mark, _Watch._stop)


def _holds(clip: Any, shown: Any) -> bool:
    return bool(
        clip.x0 - _ROUNDING <= shown.x0 and clip.y0 - _ROUNDING <= shown.y0
        and clip.x1 + _ROUNDING >= shown.x1 and clip.y1 + _ROUNDING >= shown.y1
    )  # fmt: skip


def _is_simple(image: Any) -> bool:
    """Stencils have no colours of their own; masks come as calls of their own."""
    colours = image.colorspace
    return (
        colours is not None
        and bool(mupdf.ll_fz_colorspace_is_gray(colours) or mupdf.ll_fz_colorspace_is_rgb(colours))
        and image.w * image.h <= _MOST_PIXELS
        and not (image.use_colorkey or image.use_decode)
    )


def _says_the_same(jpeg: bytes, image: Any) -> bool:
    """True if the JPEG is what the PDF says it is."""
    with Image.open(BytesIO(jpeg), formats=["JPEG"]) as file:
        # Without either marker the PDF may say how the colours are stored, which is not seen here.
        told = image.n == 1 or "jfif" in file.info or "adobe_transform" in file.info
        return told and (file.mode, file.size) == (_MODES[image.n], (image.w, image.h))


def _placed(picture: Image.Image, matrix: Any, drawing: Any, scale: float) -> Image.Image:
    """The page's sheet with the picture on it, drawn by MuPDF."""
    colours = pymupdf.csGRAY if picture.mode == "L" else pymupdf.csRGB
    samples = pymupdf.Pixmap(colours, *picture.size, picture.tobytes(), False)
    image = mupdf.fz_new_image_from_pixmap(samples.this, mupdf.FzImage())
    to_pixels = mupdf.fz_scale(scale, scale)
    area = mupdf.fz_transform_rect(mupdf.fz_bound_display_list(drawing.this), to_pixels)
    sheet = mupdf.fz_new_pixmap_with_bbox(
        colours.this, mupdf.fz_round_rect(area), mupdf.FzSeparations(), 0
    )
    mupdf.fz_clear_pixmap_with_value(sheet, 255)
    device = mupdf.fz_new_draw_device(to_pixels, sheet)
    mupdf.fz_fill_image(device, image, matrix, 1, mupdf.FzColorParams())
    mupdf.fz_close_device(device)
    return as_image(pymupdf.Pixmap("raw", sheet))
