"""Pictures of every kind reach the engine opaque, 8-bit and upright."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image

from workers.servers.cpu_ocr.request_picture import (
    RequestPicture,
    UnreadablePicture,
    from_data_uri,
    plain,
    turned,
)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def picture(data: bytes) -> RequestPicture:
    return from_data_uri("data:image/png;base64," + base64.b64encode(data).decode(), 10_000)


def reopened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_an_ordinary_picture_is_passed_on_unchanged(mode: str, form: str) -> None:
    data = encoded(Image.new(mode, (20, 10), "white"), form)
    assert plain(picture(data)) == data


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparent_areas_become_white(mode: str) -> None:
    image = Image.new(mode, (20, 10))
    assert reopened(plain(picture(encoded(image)))).convert("RGB").getpixel((3, 3)) == (255,) * 3


def test_sixteen_bits_keep_their_grey() -> None:
    image = Image.new("I;16", (20, 10), 257 * 128)
    grey = reopened(plain(picture(encoded(image)))).convert("L").getpixel((3, 3))
    assert grey == 128


def test_the_exif_orientation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(Image.new("RGB", (20, 10)), "JPEG", exif=exif)
    assert reopened(plain(picture(data))).size == (10, 20)


def test_turned_counter_clockwise() -> None:
    image = Image.new("RGB", (20, 10), "white")
    image.putpixel((19, 0), (255, 0, 0))
    quarter = reopened(turned(encoded(image), 90))
    assert quarter.size == (10, 20)
    assert quarter.getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("form", ["GIF", "TIFF", "BMP"])
def test_other_formats_are_refused(form: str) -> None:
    with pytest.raises(UnreadablePicture):
        picture(encoded(Image.new("RGB", (20, 10)), form))


def test_a_picture_cut_short_is_refused() -> None:
    noise = Image.effect_noise((80, 80), 90)
    data = encoded(noise, "JPEG")
    with pytest.raises(UnreadablePicture, match="damaged"):
        plain(picture(data[: len(data) // 2]))
