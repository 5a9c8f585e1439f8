"""Which pages are read by their own text, which by OCR, which are blank."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any

import pymupdf
import pytest
from PIL import Image, ImageDraw

from rag_service.pdf.child.page_plan import PagePlanner
from rag_service.pdf.results import PlannedPage
from rag_service.states import OcrMode
from tests.fakes import pdf_samples as samples

PROSE = " ".join([samples.PROSE] * 4)
AREA = (60, 60, 540, 700)


def plan(page: Any, mode: OcrMode = OcrMode.AUTO, *, trust: bool = False) -> PlannedPage:
    return PagePlanner(mode, trust_hidden_text=trust).plan(page, 1)


def planned(data: bytes, mode: OcrMode = OcrMode.AUTO) -> PlannedPage:
    return plan(pymupdf.open(stream=data, filetype="pdf")[0], mode)


def page(*draw: Callable[[Any], Any]) -> Any:
    """A page of a new document on which these functions have drawn, in this order."""
    document = pymupdf.open()
    document.new_page(width=600, height=800)
    for each in draw:
        each(document[0])
    copy = pymupdf.open(stream=document.tobytes(), filetype="pdf")
    fresh = copy[0]
    fresh.keep = copy
    return fresh


def text(words: str = PROSE, area: Any = AREA, **style: Any) -> Callable[[Any], Any]:
    return lambda page: page.insert_textbox(area, words, **style)


def scan(*marks: tuple[int, int, int, int], area: Any = (0, 0, 600, 800)) -> Callable[[Any], Any]:
    """A picture with lines as dark as writing at these places of a 600 x 800 page."""
    image = Image.new("L", (600, 800), 250)
    for x0, y0, x1, y1 in marks:
        for y in range(y0, y1, 12):
            ImageDraw.Draw(image).rectangle((x0, y, x1, y + 5), 40)
    data = BytesIO()
    image.save(data, "PNG")
    return lambda page: page.insert_image(area, stream=data.getvalue(), keep_proportion=False)


WRITING = (80, 80, 520, 600)


def test_text_alone_is_native() -> None:
    result = plan(page(text()))
    assert (result.plan, result.reason) == ("native", "healthy text layer")
    assert "The keeper of the house" in result.markdown
    assert (result.width_pt, result.height_pt) == (600, 800)


def test_an_empty_page_is_blank() -> None:
    assert plan(page()).plan == "blank"
    assert plan(page(text("   "))).plan == "blank"
    assert plan(page(scan())).plan == "blank"


def test_a_drawing_without_text_goes_to_ocr() -> None:
    assert plan(page(lambda p: p.draw_line((100, 100), (400, 300)))).plan == "ocr"
    assert plan(page(scan(WRITING))).reason == "no text layer"


def test_a_faint_mark_is_not_blank() -> None:
    faint = plan(page(text("x", fontsize=8, color=(0.7, 0.7, 0.7))), OcrMode.FORCE)
    assert faint.plan == "ocr"


def test_a_scan_with_hidden_text_goes_to_ocr() -> None:
    layers = (scan(WRITING), text(render_mode=3))
    assert plan(page(*layers)).reason == "hidden text over a picture of the page"
    trusted = plan(page(*layers), trust=True)
    assert trusted.plan == "native"
    assert "The keeper of the house" in trusted.markdown


def test_text_under_a_scan_counts_as_hidden() -> None:
    assert plan(page(text(), scan(WRITING))).reason == "hidden text over a picture of the page"


def test_a_scan_in_strips_is_one_picture() -> None:
    strips = [scan(WRITING, area=(0, top, 600, top + 100)) for top in range(0, 800, 100)]
    assert plan(page(*strips, text(render_mode=3))).plan == "ocr"


def test_hidden_text_without_a_picture_is_kept() -> None:
    assert plan(page(text(render_mode=3))).plan == "native"


@pytest.mark.parametrize("rotation", [0, 90])
def test_a_scan_with_a_typed_stamp_goes_to_ocr(rotation: int) -> None:
    stamp = text(PROSE[:150], area=(60, 720, 540, 790), fontsize=8)
    stamped = page(scan(WRITING), stamp, lambda p: p.set_rotation(rotation))
    assert plan(stamped).reason == "a picture of the page shows more than its text"


def test_text_on_coloured_paper_is_native() -> None:
    assert plan(page(scan(), text())).plan == "native"


def test_text_beside_a_picture_is_native() -> None:
    figure = scan(WRITING, area=(100, 400, 500, 700))
    assert plan(page(figure, text(area=(60, 60, 540, 390)))).plan == "native"


def nameless_glyphs() -> bytes:
    """Drawn boxes under the codes 2 to 15, which no table maps to letters."""
    names = [b"/g%d" % code for code in range(2, 16)]
    return samples.one_page(
        b"BT /F2 12 Tf 72 700 Td (\\002\\003 \\004\\005\\006\\007 \\010\\016\\017) Tj ET",
        b"/Font<</F2 6 0 R>>",
        b"<</Type/Font/Subtype/Type3/FontBBox[0 0 9 9]/FontMatrix[.1 0 0 .1 0 0]/FirstChar 2"
        b"/LastChar 15/Widths[%s]/Resources<<>>/Encoding<</Differences[2%s]>>/CharProcs<<%s>>>>"
        % (b"9 " * 14, b"".join(names), b"".join(name + b" 7 0 R" for name in names)),
        samples.stream(b"", b"9 0 0 0 9 9 d1 0 0 7 7 re f"),
    )


def test_meaningless_characters_go_to_ocr_or_are_kept_with_a_warning() -> None:
    assert planned(nameless_glyphs()).reason == "characters without meaning"
    assert planned(nameless_glyphs()).plan == "ocr"
    kept = planned(nameless_glyphs(), OcrMode.OFF)
    assert (kept.plan, kept.no_text) == ("native", False)
    assert [warning.code for warning in kept.warnings] == ["text_layer_rejected"]


def test_forced_ocr_reads_all_but_blank_pages() -> None:
    forced = plan(page(text()), OcrMode.FORCE)
    assert (forced.plan, forced.markdown) == ("ocr", "")
    assert plan(page(), OcrMode.FORCE).plan == "blank"


def test_without_ocr_bad_text_is_kept_with_a_warning() -> None:
    kept = plan(page(scan(WRITING), text(render_mode=3)), OcrMode.OFF)
    assert kept.plan == "native"
    assert "The keeper of the house" in kept.markdown
    assert [warning.code for warning in kept.warnings] == ["text_layer_rejected"]
    assert not kept.no_text


def test_without_ocr_a_scan_has_no_text() -> None:
    scanned = plan(page(scan(WRITING)), OcrMode.OFF)
    assert scanned.no_text
    assert [warning.code for warning in scanned.warnings] == ["page_without_text"]
    assert plan(page(), OcrMode.OFF).plan == "blank"


def test_a_page_blank_because_of_damage_carries_a_warning() -> None:
    damaged = planned(samples.one_page(b"BT /F1 12 Tf (unfinished ] >> )) Tj [ET )(", b""))
    assert damaged.plan == "blank"
    assert [warning.code for warning in damaged.warnings] == ["repaired_pdf"]
    assert planned(samples.one_page(b"", b"")).warnings == ()


def test_text_of_annotations_and_form_fields_counts() -> None:
    def field(page: Any) -> None:
        widget = pymupdf.Widget()
        widget.field_type, widget.field_name = pymupdf.PDF_WIDGET_TYPE_TEXT, "name"
        widget.field_value = "Filled into the form by the applicant"
        widget.rect = pymupdf.Rect(60, 60, 400, 80)
        page.add_widget(widget)

    filled = plan(page(field))
    assert filled.plan == "native"
    assert "Filled into the form" in filled.markdown


def test_the_size_is_that_of_the_shown_page() -> None:
    turned = plan(page(text(), lambda p: p.set_rotation(90)))
    assert (turned.width_pt, turned.height_pt) == (800, 600)
