"""The file types that intake accepts, by their first bytes."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from rag_service.pdf.media_type import HEAD_BYTES, IMAGES, PDF, media_type_of


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP", "MPO"])
def test_pictures_written_by_pillow_are_recognised(kind: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, kind)
    expected = "image/jpeg" if kind == "MPO" else f"image/{kind.lower()}"
    assert media_type_of(file.getvalue()) == expected
    assert expected in IMAGES


@pytest.mark.parametrize("garbage", [b"", b"\n", b"From: a@b\r\n\r\n", b"x" * (HEAD_BYTES - 4)])
def test_a_pdf_header_may_follow_other_bytes(garbage: bytes) -> None:
    assert media_type_of(garbage + b"%PDF-1.7\n") == PDF


def test_a_pdf_header_after_the_first_kilobyte_does_not_count() -> None:
    assert media_type_of(b"x" * HEAD_BYTES + b"%PDF-1.7\n") is None


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"hello", id="text"),
        pytest.param(b"GIF89a\x01\0\x01\0", id="gif"),
        pytest.param(b"BM\x9a\0\0\0\0\0\0\0", id="bmp"),
        pytest.param(b"PK\x03\x04\x14\0\x06\0", id="zip or docx"),
        pytest.param(b"RIFF\x24\0\0\0WAVEfmt ", id="wav"),
        pytest.param(b"\0\0\0\x0cjP  \r\n\x87\n", id="jpeg 2000"),
        pytest.param(b"II*\0\x10\0\0\0CR\x02\0", id="canon raw"),
        pytest.param(b"II*\0", id="cut tiff"),
        pytest.param(b"\xff\xd8", id="cut jpeg"),
    ],
)
def test_other_files_are_not_recognised(head: bytes) -> None:
    assert media_type_of(head) is None


@pytest.mark.parametrize("order", [b"II*\0", b"MM\0*"])
def test_both_byte_orders_of_tiff_are_recognised(order: bytes) -> None:
    assert media_type_of(order + b"\x08\0\0\0\0\0") == "image/tiff"
