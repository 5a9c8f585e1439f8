"""Picture files as documents: each picture is one page. Runs in the render child."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image, ImageOps

from rag_service.errors import CorruptPdf, PageTooLarge, PageUnrenderable, RagServiceError
from rag_service.pdf.child import ink
from rag_service.pdf.child.memory_shortage import is_shortage, too_large
from rag_service.pdf.child.raster import Raster
from rag_service.pdf.child.render import MAX_SIDE, MIN_DPI, POINTS_PER_INCH, Resolution, as_raster
from rag_service.pdf.child_limits import ChildLimits
from rag_service.pdf.results import PdfWarning, PlannedPage
from rag_service.states import OcrMode, PagePlan

FORMATS = {
    "image/png": ["PNG"],
    "image/jpeg": ["JPEG", "MPO"],
    "image/tiff": ["TIFF"],
    "image/webp": ["WEBP"],
}
# Cameras and screenshots write 72 or 96 DPI, which says nothing about paper.
MIN_PAPER_DPI = 100
# The assumed paper of a picture without a resolution: A3's long side.
PAPER_INCHES = 16.54
# What Pillow raises on damaged files.
_BAD_PICTURE = (OSError, SyntaxError, ValueError, EOFError, MemoryError)
_SIXTEEN_BITS = frozenset({"I", "I;16", "I;16B", "I;16L", "I;16N"})
_EXIF_ORIENTATION = 0x0112
_SIDEWAYS = frozenset({5, 6, 7, 8})


class ImageSource:
    """A PNG, JPEG, TIFF (all its pages) or WebP file opened by Pillow."""

    repaired = False

    def __init__(self, path: Path, media_type: str, limits: ChildLimits) -> None:
        self.media_type = media_type
        self._path = path
        self._limits = limits
        # A TIFF file stays open between pages: its pages are a linked list.
        self._kept: Image.Image | None = None
        # _load limits memory, in bytes instead of pixels.
        Image.MAX_IMAGE_PIXELS = None
        try:
            with self._open() as image:
                frames = getattr(image, "n_frames", 1)
        except _BAD_PICTURE as error:
            raise CorruptPdf(f"The picture file is damaged ({error}).") from error
        # In the other formats, more frames are animations and previews, not pages.
        self.pages: int = frames if media_type == "image/tiff" else 1

    def plan(self, number: int, mode: OcrMode, *, pixels: bool) -> PlannedPage:
        """Plan a picture: blank or OCR, and native without text if OCR is off."""
        width, height, blank = self._measure(number, pixels=pixels)
        if blank:
            return PlannedPage(number, PagePlan.BLANK, "nothing is drawn", width, height)
        if mode is OcrMode.OFF:
            warning = PdfWarning("page_without_text", "OCR is off; this is a picture.", number)
            return PlannedPage(
                number, PagePlan.NATIVE, "a picture file", width, height,
                warnings=(warning,), no_text=True,
            )  # fmt: skip
        return PlannedPage(number, PagePlan.OCR, "a picture file", width, height)

    def draw(self, number: int, dpi: float) -> Raster:
        """Draw a picture at its own size, or smaller as `dpi` and max_pixels demand."""
        try:
            with self._page(number) as file:
                image = _flatten(self._load(file, number))
                resolution, scale = choose_scale(
                    image.size, _paper_dpi(file), dpi, self._limits.max_pixels
                )
        except _BAD_PICTURE as error:
            raise self._page_error(number, error) from error
        if resolution.capped and resolution.dpi < MIN_DPI:
            raise PageTooLarge(page=number)
        width, height = (max(1, round(side * scale)) for side in image.size)
        if (width, height) != image.size:
            image = image.resize((width, height), Image.Resampling.LANCZOS, reducing_gap=3.0)
        elif image is self._kept:
            image = image.copy()
        return as_raster(image, number, resolution)

    def close(self) -> None:
        """Close the file if it was kept open."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    @contextmanager
    def _page(self, number: int) -> Iterator[Image.Image]:
        """Open the file at page `number`, not yet decoded."""
        if self.media_type != "image/tiff":
            with self._open() as image:
                image.seek(number - 1)
                yield image
            return
        try:
            self._kept = self._kept or self._open()
            if self._kept.tell() != number - 1:
                # Pillow keeps what the last page says of itself if the next one says nothing.
                self._kept.info.clear()
                self._kept.seek(number - 1)
            yield self._kept
        except BaseException:
            # After an error its state is uncertain.
            self.close()
            raise

    def _page_error(self, number: int, error: BaseException) -> RagServiceError:
        if is_shortage(error):
            return too_large(number, self._limits.max_mib)
        return PageUnrenderable(f"Picture {number} cannot be decoded ({error}).", page=number)

    def _open(self) -> Image.Image:
        return Image.open(self._path, formats=FORMATS[self.media_type])

    def _measure(self, number: int, *, pixels: bool) -> tuple[float, float, bool]:
        """Return the size in points as shown, and whether nothing is drawn."""
        try:
            with self._page(number) as file:
                to_points = POINTS_PER_INCH / (_paper_dpi(file) or POINTS_PER_INCH)
                width, height = (side * to_points for side in _upright_size(file))
                blank = pixels and self._is_blank(file, number)
        except _BAD_PICTURE as error:
            raise self._page_error(number, error) from error
        return width, height, blank

    def _is_blank(self, file: Image.Image, number: int) -> bool:
        side = round(math.sqrt(ink.PREVIEW_PIXELS))
        file.draft("L", (side, side))
        image = _flatten(self._load(file, number)).convert("L")
        image.thumbnail((side, side), reducing_gap=1.0)
        return ink.is_blank(image)

    def _load(self, file: Image.Image, number: int) -> Image.Image:
        """Decode page `number`, upright. Raises PageTooLarge if it would not fit into memory."""
        width, height = file.size
        needed = width * height * len(file.getbands()) / (1 << 20)
        if needed > self._limits.max_mib:
            raise PageTooLarge(
                f"Picture {number} of {width} x {height} pixels needs {needed:.0f} MiB; "
                f"pdf.child_max_mib is {self._limits.max_mib}.",
                page=number,
            )
        if file.getexif().get(_EXIF_ORIENTATION, 1) != 1:
            return ImageOps.exif_transpose(file)
        # Not copied: a picture may take most of the memory.
        file.load()
        return file


def choose_scale(
    size: tuple[int, int], paper_dpi: float | None, dpi: float, max_pixels: int
) -> tuple[Resolution, float]:
    """Return the DPI to draw a picture of `size` pixels at, and the scale, at most 1."""
    longest = max(size)
    own = paper_dpi or max(longest / PAPER_INCHES, dpi)
    wanted = min(1.0, dpi / own)
    possible = min(math.sqrt(max_pixels / (size[0] * size[1])), MAX_SIDE / longest)
    scale = min(wanted, possible)
    return Resolution(own * scale, capped=possible < wanted), scale


def _paper_dpi(image: Image.Image) -> float | None:
    """Return the resolution written in the file, or None if it cannot be that of paper."""
    dpi = float(min(image.info.get("dpi") or (0, 0)))
    return dpi if dpi >= MIN_PAPER_DPI else None


def _upright_size(image: Image.Image) -> tuple[int, int]:
    width, height = image.size
    sideways = image.getexif().get(_EXIF_ORIENTATION) in _SIDEWAYS
    return (height, width) if sideways else (width, height)


def _flatten(image: Image.Image) -> Image.Image:
    """Convert to RGB or grey; transparent areas become white."""
    if image.mode in _SIXTEEN_BITS:
        return image.convert("I").point(lambda level: level / 256).convert("L")
    if image.mode in ("L", "RGB") and "transparency" not in image.info:
        return image
    if image.mode in ("1", "L"):
        return image.convert("L")
    if "A" in image.getbands() or "transparency" in image.info:
        layer = image.convert("RGBA")
        paper = Image.new("RGB", layer.size, "white")
        paper.paste(layer, mask=layer.getchannel("A"))
        return paper
    return image.convert("RGB")
