"""Scans decoded without MuPDF look as MuPDF draws them; MuPDF draws all other pages."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import pymupdf
import pytest
from PIL import Image, ImageChops, ImageCms, ImageDraw, ImageFont

from rag_service.pdf.child.render import draw_page, preview_of
from rag_service.pdf.child.scanned_page import find_scan
from tests.fakes.pdf_samples import one_page, stream

SIZE = (1275, 1650)
PAPER = (238, 238, 232)
PLACED = b"q 612 0 0 792 0 0 cm /I Do Q "


def writing(mode: str = "L", stamp: Any = None) -> Image.Image:
    """A page of large letters at 150 DPI, no two corners alike."""
    page = Image.new("RGB", SIZE, PAPER)
    draw = ImageDraw.Draw(page)
    font = ImageFont.load_default(40)
    for line in range(24):
        draw.text((100, 80 + 60 * line), f"Line {line} " * (line % 5 + 1), (20, 20, 20), font)
    draw.rectangle((0, 0, 200, 60), (60, 60, 60))
    if stamp is not None:
        draw.text((800, 1500), "PAID", stamp, font)
    return page.convert(mode)


def jpeg(image: Image.Image, **how: Any) -> bytes:
    out = BytesIO()
    image.save(out, "JPEG", quality=85, **how)
    return out.getvalue()


def picture(data: bytes, entries: bytes = b"", colours: bytes = b"/DeviceGray") -> bytes:
    return stream(
        b"/Type/XObject/Subtype/Image/Width %d/Height %d/BitsPerComponent 8/ColorSpace %s%s%s"
        % (*SIZE, colours, entries, b"" if b"/Filter" in entries else b"/Filter/DCTDecode"),
        data,
    )


def page_of(content: bytes, *objects: bytes, resources: bytes = b"") -> bytes:
    return one_page(content, b"/XObject<</I 6 0 R/J 7 0 R>>" + resources, *objects)


def without_markers(data: bytes) -> bytes:
    """A JPEG without its first segment, JFIF, which states how its colours are stored."""
    length = int.from_bytes(data[4:6], "big")
    return data[:2] + data[4 + length :]


def drawn_by_mupdf(page: Any, dpi: int) -> Image.Image:
    pixels = page.get_pixmap(dpi=dpi)
    return Image.frombytes("RGB", (pixels.width, pixels.height), pixels.samples)


def assert_same(data: bytes, *, is_scan: bool) -> Image.Image:
    """Draw the first page and compare it with MuPDF's drawing, at two resolutions."""
    with pymupdf.open(stream=data, filetype="pdf") as document:
        if document.needs_pass:
            document.authenticate("")
        page = document[0]
        try:
            found = find_scan(page.get_displaylist()) is not None
        except OSError:
            found = False
        assert found == is_scan
        for dpi in (40, 72, 150):
            drawn = draw_page(page, 1, dpi, max_pixels=16_000_000).image
            wanted = drawn_by_mupdf(page, dpi)
            assert drawn.size == wanted.size
            difference = ImageChops.difference(drawn.convert("RGB"), wanted)
            # Another scaling method changes the edges of letters, never whole areas.
            assert max(high for _, high in difference.reduce(4).getextrema()) < 40
            assert (
                sum(difference.convert("L").histogram()[60:]) < 0.002 * drawn.width * drawn.height
            )
    return drawn


GREY = picture(jpeg(writing()))
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
UNMARKED = without_markers(jpeg(writing("RGB")))


@pytest.mark.parametrize(
    "content",
    [
        PLACED,
        b"q 500 0 0 700 50 40 cm /I Do Q",
        b"q 0 792 -612 0 612 0 cm /I Do Q",
        b"q 600 20 -25 780 20 5 cm /I Do Q",
        b"q -612 0 0 -792 612 792 cm /I Do Q",
        b"q 640 0 0 820 -14 -14 cm /I Do Q",
        b"0 0 612 792 re W n " + PLACED,
        b"q 50 40 500 700 re W n q 500 0 0 700 50 40 cm /I Do Q Q",
        PLACED + b"BT 3 Tr /F1 12 Tf 72 700 Td (seen by nobody) Tj ET",
    ],
    ids=["whole", "margins", "turned", "skewed", "mirrored", "larger", "clipped to the page",
         "clipped to itself", "under hidden text"],
)  # fmt: skip
def test_a_page_that_is_a_scan(content: bytes) -> None:
    assert_same(page_of(content, GREY), is_scan=True)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        PLACED + b"BT /F1 40 Tf 72 400 Td (PAID) Tj ET",
        PLACED + b"100 100 200 50 re f",
        b"q 0 0 300 792 re W n " + PLACED + b"Q",
        b"q 0 0 m 612 0 l 306 792 l h W n " + PLACED + b"Q",
        PLACED + b"q 100 0 0 100 300 300 cm /I Do Q",
    ],
    ids=["nothing", "text over it", "a box over it", "a clip", "a slanted clip", "twice"],
)  # fmt: skip
def test_a_page_that_shows_more_or_less_than_a_scan(content: bytes) -> None:
    assert_same(page_of(content, GREY), is_scan=False)


@pytest.mark.parametrize("state", [b"/ca 0.5", b"/BM/Multiply"])
def test_a_scan_that_is_blended_with_its_paper(state: bytes) -> None:
    states = b"/ExtGState<</G<<%s>>>>" % state
    assert_same(page_of(b"/G gs " + PLACED, GREY, resources=states), is_scan=False)


@pytest.mark.parametrize(
    ("entries", "data", "colours"),
    [
        (b"/Decode[1 0]", jpeg(writing()), b"/DeviceGray"),
        (b"/SMask 7 0 R", jpeg(writing()), b"/DeviceGray"),
        (b"/Mask[0 90]", jpeg(writing()), b"/DeviceGray"),
        (b"", jpeg(writing("CMYK")), b"/DeviceCMYK"),
        (b"", jpeg(writing()), b"[/Indexed/DeviceRGB 255 8 0 R]"),
        (b"/Filter/FlateDecode", b"", b"/DeviceGray"),
        (b"/DecodeParms<</ColorTransform 0>>", UNMARKED, b"/DeviceRGB"),
        (b"", jpeg(writing("RGB")), b"/DeviceGray"),
        (b"", jpeg(writing().resize((600, 700))), b"/DeviceGray"),
        (b"", jpeg(writing())[:30_000], b"/DeviceGray"),
        (b"", b"no picture at all", b"/DeviceGray"),
    ],
    ids=["inverted", "soft mask", "colour key", "CMYK", "indexed", "no JPEG", "unmarked colours",
         "other colours", "another size", "cut off", "no picture"],
)  # fmt: skip
def test_a_picture_that_is_not_plain(entries: bytes, data: bytes, colours: bytes) -> None:
    mask = picture(jpeg(writing().transpose(Image.Transpose.ROTATE_180)))
    palette = stream(b"", bytes(range(256)) * 3)
    whole = len(data) == 30_000
    assert_same(page_of(PLACED, picture(data, entries, colours), mask, palette), is_scan=whole)


def in_colour(data: bytes, profile: bytes) -> bytes:
    colours = b"[/ICCBased 7 0 R]" if profile else b"/DeviceRGB"
    return page_of(PLACED, picture(data, b"", colours), stream(b"/N 3", profile))


@pytest.mark.parametrize(
    ("stamp", "mode"), [(None, "L"), ((200, 20, 20), "RGB")], ids=["tinted paper", "red stamp"]
)
@pytest.mark.parametrize("profile", [b"", SRGB], ids=["plain", "profile"])
@pytest.mark.parametrize("how", [{}, {"progressive": True}, {"subsampling": 0}], ids=str)
def test_a_colour_scan_without_visible_colour_is_grey(
    stamp: Any, mode: str, profile: bytes, how: dict[str, Any]
) -> None:
    data = in_colour(jpeg(writing("RGB", stamp), **how), profile)
    assert assert_same(data, is_scan=True).mode == mode


def test_colours_are_those_of_their_profile() -> None:
    """Red and green are exchanged by the profile."""
    odd = SRGB.replace(b"rXYZ", b"    ").replace(b"gXYZ", b"rXYZ").replace(b"    ", b"gXYZ", 1)
    assert_same(in_colour(jpeg(writing("RGB", (200, 20, 20))), odd), is_scan=True)


def test_a_thin_line_of_colour_is_detected() -> None:
    page = writing("RGB")
    ImageDraw.Draw(page).line((100, 1600, 1100, 1600), (200, 70, 70))
    data = in_colour(jpeg(page, subsampling=0), b"")
    assert assert_same(data, is_scan=True).mode == "RGB"


def test_a_scan_in_an_encrypted_file() -> None:
    with pymupdf.open(stream=page_of(PLACED, GREY), filetype="pdf") as document:
        locked = document.tobytes(encryption=pymupdf.PDF_ENCRYPT_AES_256, owner_pw="o")
    assert_same(locked, is_scan=True)


def test_a_turned_page() -> None:
    with pymupdf.open(stream=page_of(PLACED, GREY), filetype="pdf") as document:
        document[0].set_rotation(90)
        turned = document.tobytes()
    assert_same(turned, is_scan=True)


def kept_by_mupdf() -> bytes:
    """MuPDF's own list of what it has cached."""
    said = pymupdf.mupdf.FzBuffer(1)
    listing = pymupdf.mupdf.FzOutput(said)
    pymupdf.mupdf.fz_debug_store(listing)
    listing.fz_close_output()
    return bytes(said.fz_buffer_extract())


@pytest.mark.parametrize("content", [PLACED, PLACED + b"100 100 200 50 re f"])
def test_no_drawn_page_leaves_its_picture_in_memory(content: bytes) -> None:
    with pymupdf.open(stream=page_of(content, GREY), filetype="pdf") as document:
        page = document[0]
        for draw in (preview_of, lambda page: draw_page(page, 1, 150, max_pixels=16_000_000)):
            page.get_pixmap(dpi=20)
            assert b"key=" in kept_by_mupdf()
            draw(page)
            assert b"key=" not in kept_by_mupdf()
