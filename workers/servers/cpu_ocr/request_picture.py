"""The picture of a request: decoded from its data URI, checked, converted, turned."""

from __future__ import annotations

import base64
import binascii
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP")
# Quarter turns counter-clockwise, as Pillow names them.
TURNS = {90: "ROTATE_90", 180: "ROTATE_180", 270: "ROTATE_270"}


class UnreadablePicture(Exception):
    """The server cannot read this picture; the message says why."""


@dataclass(frozen=True, slots=True)
class RequestPicture:
    """An encoded picture: its format and size are checked, its pixels are not yet decoded."""

    data: bytes
    width: int
    height: int


def from_data_uri(uri: str, max_pixels: int) -> RequestPicture:
    """Decode `data:image/…;base64,…` and check the picture's header.

    Raises UnreadablePicture for anything but a PNG, JPEG or WebP of at most max_pixels.
    """
    head, comma, body = uri.partition(",")
    if not head.startswith("data:"):
        raise UnreadablePicture("Only data URIs are supported; no URL is fetched.")
    if not comma or not head.endswith(";base64"):
        raise UnreadablePicture("The data URI must have the form data:image/png;base64,….")
    try:
        data = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UnreadablePicture(f"The picture is not valid base64: {error}") from error
    width, height = _size(data)
    if width * height > max_pixels:
        raise UnreadablePicture(
            f"The picture has {width} x {height} pixels; at most {max_pixels} are allowed."
        )
    return RequestPicture(data, width, height)


def _size(data: bytes) -> tuple[int, int]:
    from PIL import Image

    try:
        # Only the header is read. Pillow's own pixel limit is only a warning.
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return image.size
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UnreadablePicture("The picture is not a readable PNG, JPEG or WebP.") from error


def plain(picture: RequestPicture) -> bytes:
    """Convert a picture to a form that every engine reads alike: opaque, 8 bits, EXIF applied.

    Returns the same bytes if the picture already has this form. Raises UnreadablePicture if the
    pixels are damaged or incomplete.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(picture.data), formats=FORMATS) as image:
            image.load()
            upright = ImageOps.exif_transpose(image)
    except (OSError, SyntaxError, ValueError) as error:
        raise UnreadablePicture(f"The picture is damaged: {error}") from error
    if upright.size == image.size and upright.mode in ("L", "RGB") and "exif" not in image.info:
        return picture.data
    return _encode(_opaque(upright))


def turned(data: bytes, degrees: int) -> bytes:
    """Turn a plain picture counter-clockwise by 90, 180 or 270 degrees."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return _encode(image.transpose(Image.Transpose[TURNS[degrees]]))


def _opaque(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode.startswith("I"):
        image = image.convert("I").point(lambda level: level / 257).convert("L")
    if not image.has_transparency_data:
        return image.convert("RGB")
    layered = image.convert("RGBA")
    paper = Image.new("RGBA", layered.size, "white")
    return Image.alpha_composite(paper, layered).convert("RGB")


def _encode(image: Image.Image) -> bytes:
    # BMP is written and read as fast as a copy; a PNG would take as long as the turn.
    buffer = io.BytesIO()
    image.save(buffer, "BMP")
    return buffer.getvalue()
