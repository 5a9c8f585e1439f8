"""Whether a page has colour, by what it draws: never grey if its pixels have colour."""

from __future__ import annotations

import zlib

import pymupdf
import pytest

from rag_service.pdf.child.page_colour import has_colour, is_surely_grey
from rag_service.pdf.child.render import draw_page
from tests.fakes.pdf_samples import one_page, prose_stream, stream

TYPE3 = (
    b"<</Type/Font/Subtype/Type3/FontBBox[0 0 1000 1000]/FontMatrix[0.001 0 0 0.001 0 0]"
    b"/CharProcs<</a 7 0 R>>/Encoding<</Type/Encoding/Differences[97/a]>>"
    b"/FirstChar 97/LastChar 97/Widths[1000]/Resources<<>>>>"
)
SHADING = (
    b"<</ShadingType 2/ColorSpace/DeviceRGB/Coords[0 0 612 0]"
    b"/Function<</FunctionType 2/Domain[0 1]/N 1/C0[1 0 0]/C1[0 0 1]>>>>"
)


def picture(colours: bytes, sample: bytes) -> bytes:
    entries = b"/Subtype/Image/Width 8/Height 8/BitsPerComponent 8/Filter/FlateDecode/ColorSpace"
    return stream(entries + colours, zlib.compress(sample * 64))


PLACED = b" q 300 0 0 300 100 100 cm /I Do Q"


@pytest.mark.parametrize(
    ("content", "objects", "surely_grey", "grey"),
    [
        (b"", [], True, True),
        (b" 0.5 g 9 9 90 90 re f", [], True, True),
        (b" 0.4 0.4 0.4 rg 9 9 90 90 re f", [], True, True),
        (PLACED, [picture(b"/DeviceGray", b"\x80")], True, True),
        # Grey by its pixels only.
        (PLACED, [picture(b"/DeviceRGB", b"\x80\x80\x80")], False, True),
        (PLACED, [picture(b"/DeviceRGB", b"\x80\x00\x80")], False, False),
        (b" 1 0 0 rg 9 9 90 90 re f", [], False, False),
        (b" 1 0 0 RG 9 w 9 9 m 400 400 l S", [], False, False),
        (b" BT 0 0.6 0 rg /F1 30 Tf 90 90 Td (in green letters) Tj ET", [], False, False),
        (b" 0 1 0 0 k 9 9 90 90 re f", [], False, False),
        # Too little to count.
        (b" 1 0 0 rg 9 9 1 1 re f", [], False, True),
        (b" /S sh", [SHADING], False, False),
        (b" BT /T 90 Tf 90 90 Td (a) Tj ET",
         [TYPE3, stream(b"", b"1000 0 d0 1 0 0 rg 0 0 800 800 re f")], False, False),
    ],
    ids=["black text", "grey box", "grey in RGB", "grey picture", "RGB picture of greys", "purple",
         "red box", "red line", "green text", "magenta ink", "a red dot", "a shading",
         "a letter with a colour of its own"],
)  # fmt: skip
def test_grey_is_certain_or_seen(
    content: bytes, objects: list[bytes], surely_grey: bool, grey: bool
) -> None:
    resources = b"/XObject<</I 6 0 R>>/Shading<</S 6 0 R>>/Font<</F1 5 0 R/T 6 0 R>>"
    data = one_page(prose_stream() + content, resources, *objects)
    with pymupdf.open(stream=data, filetype="pdf") as document:
        page = document[0]
        assert is_surely_grey(page, page.get_displaylist()) == surely_grey
        assert draw_page(page, 1, 100, max_pixels=16_000_000).grey == grey


def test_an_annotation_has_colours_too() -> None:
    with pymupdf.open(stream=one_page(prose_stream(), b""), filetype="pdf") as document:
        page = document[0]
        page.add_rect_annot((50, 50, 300, 300)).update(fill_color=(1, 0.8, 0))
        assert not is_surely_grey(page, page.get_displaylist())
        image = draw_page(page, 1, 100, max_pixels=16_000_000).image
        assert image.mode == "RGB"
        assert has_colour(image)
