"""Pages copied from a document to a new PDF: all that they show, nothing more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pymupdf
import pytest
from PIL import Image

from rag_service.config.loader import load_settings
from rag_service.errors import CorruptPdf, EmptyFile, PageTooLarge, PageUnrenderable
from rag_service.pdf.results import PdfWarning
from rag_service.pdf.session import PdfSession
from tests.fakes import heavy_scans
from tests.fakes import pdf_samples as samples

DPI = 150


def cut(
    source: Path, pages: list[int], target: Path, *, dpi: int = DPI, quality: int | None = None,
    **limits: int,
) -> tuple[PdfWarning, ...]:  # fmt: skip
    async def work() -> tuple[PdfWarning, ...]:
        async with PdfSession(load_settings().pdf.model_copy(update=limits), 100) as pdf:
            return await pdf.slice(source, pages, target, dpi=dpi, jpeg_quality=quality)

    return asyncio.run(work())


def texts(path: Path) -> list[str]:
    with pymupdf.open(path) as document:
        return [page.get_text() for page in document]


def drawn(path: Path, number: int = 1, dpi: int = DPI) -> Image.Image:
    with pymupdf.open(path) as document:
        pixels = document[number - 1].get_pixmap(dpi=dpi, colorspace=pymupdf.csGRAY)
        return Image.frombytes("L", (pixels.width, pixels.height), pixels.samples)


def test_pages_of_a_pdf_come_in_the_given_order(tmp_path: Path) -> None:
    source = samples.text_document(tmp_path / "long.pdf", 9)
    assert cut(source, [7, 2, 3], tmp_path / "some.pdf") == ()
    found = texts(tmp_path / "some.pdf")
    assert [text.split(" of ")[0] for text in found] == [
        f"This is page {number}" for number in (7, 2, 3)
    ]


def test_the_open_document_stays_open(tmp_path: Path) -> None:
    source = samples.text_document(tmp_path / "a.pdf", 2)
    other = samples.text_document(tmp_path / "b.pdf", 5)

    async def work() -> None:
        async with PdfSession(load_settings().pdf, 100) as pdf:
            await pdf.open(source, "application/pdf")
            await pdf.slice(other, [5], tmp_path / "c.pdf", dpi=DPI)
            assert (await pdf.render(2, 72)).width == 595

    asyncio.run(work())


def test_a_copied_page_contains_only_the_pictures_that_it_draws(tmp_path: Path) -> None:
    """Scanner software that gives all pages one list of all pictures."""
    scan, shared = heavy_scans.scan(tmp_path / "scan.pdf", 4, dpi=100), tmp_path / "shared.pdf"
    with pymupdf.open(scan) as document:
        names = {f"P{page.number}": page.get_images()[0][0] for page in document}
        everything = "<</XObject<<" + "".join(f"/{n} {x} 0 R" for n, x in names.items()) + ">>>>"
        for page in document:
            document.xref_set_key(page.xref, "Resources", everything)
            content = b"q 612 0 0 792 0 0 cm /P%d Do Q" % page.number
            document.update_stream(page.get_contents()[0], content)
        document.save(shared, garbage=2)
    cut(shared, [3], tmp_path / "one.pdf")
    assert (tmp_path / "one.pdf").stat().st_size < shared.stat().st_size / 3
    assert drawn(tmp_path / "one.pdf").tobytes() == drawn(shared, 3).tobytes()
    cut(shared, [1, 2, 3, 4], tmp_path / "all.pdf")
    for number in range(1, 5):
        assert drawn(tmp_path / "all.pdf", number).tobytes() == drawn(shared, number).tobytes()


def test_a_form_without_resources_of_its_own_keeps_the_pages_pictures(tmp_path: Path) -> None:
    form = samples.stream(
        b"/Type/XObject/Subtype/Form/BBox[0 0 612 792]", b"q 300 0 0 300 0 0 cm /Inner Do Q"
    )
    image = samples.stream(
        b"/Type/XObject/Subtype/Image/Width 1/Height 1/ColorSpace/DeviceGray/BitsPerComponent 8",
        b"\x00",
    )
    source = tmp_path / "form.pdf"
    source.write_bytes(
        samples.one_page(b"/Outer Do", b"/XObject<</Outer 6 0 R/Inner 7 0 R>>", form, image)
    )
    cut(source, [1], tmp_path / "cut.pdf")
    assert drawn(tmp_path / "cut.pdf").tobytes() == drawn(source).tobytes()
    assert drawn(source).getextrema() == (0, 255)


def test_layers_that_are_off_stay_off(tmp_path: Path) -> None:
    source = tmp_path / "layers.pdf"
    with pymupdf.open() as document:
        layer = document.add_ocg("draft", on=False)
        for text in ("one", "two"):
            page = document.new_page()
            page.insert_text((72, 90), text)
            page.insert_image((72, 100, 400, 400), stream=heavy_scans.picture("X", 72), oc=layer)
        document.save(source)
    cut(source, [2], tmp_path / "cut.pdf")
    assert drawn(tmp_path / "cut.pdf").tobytes() == drawn(source, 2).tobytes()


def test_pictures_become_pages_with_the_same_pixels(tmp_path: Path) -> None:
    for name, mode in (("a.png", "RGB"), ("a.jpg", "L"), ("a.webp", "RGB"), ("a.tif", "1")):
        source = tmp_path / name
        image = Image.new(mode, (413, 301), "white")
        image.paste("black", (20, 20, 120, 220))
        image.save(source)
        cut(source, [1], tmp_path / "cut.pdf")
        shown = drawn(tmp_path / "cut.pdf")
        assert abs(shown.width - 413) <= 1
        assert abs(shown.height - 301) <= 1
        assert shown.getpixel((70, 100)) < 20
        assert shown.getpixel((200, 100)) > 235


def tiff(path: Path, *, damaged: int | None = None) -> Path:
    """Three frames of noise; the pixels of one may be damaged."""
    frames = [Image.effect_noise((300, 200 + 10 * n), 60) for n in range(3)]
    frames[0].save(path, save_all=True, append_images=frames[1:], compression="tiff_adobe_deflate")
    if damaged is not None:
        with Image.open(path) as image:
            image.seek(damaged - 1)
            offset = image.tag_v2[273][0]
        content = bytearray(path.read_bytes())
        content[offset : offset + 400] = b"\xff" * 400
        path.write_bytes(content)
    return path


def test_frames_of_a_tiff_come_in_the_order_asked(tmp_path: Path) -> None:
    cut(tiff(tmp_path / "a.tif"), [3, 1], tmp_path / "cut.pdf")
    with pymupdf.open(tmp_path / "cut.pdf") as document:
        ratios = [round(page.rect.height / page.rect.width * 300) for page in document]
    assert ratios == [220, 200]


def test_a_damaged_frame_is_named(tmp_path: Path) -> None:
    source = tiff(tmp_path / "a.tif", damaged=2)
    with pytest.raises(PageUnrenderable) as caught:
        cut(source, [1, 2, 3], tmp_path / "cut.pdf")
    assert caught.value.page == 2


def test_a_capped_picture_says_so(tmp_path: Path) -> None:
    source = tmp_path / "a.png"
    Image.effect_noise((2000, 1000), 60).save(source, dpi=(150, 150))
    [warning] = cut(source, [1], tmp_path / "cut.pdf", max_pixels=500_000)
    assert (warning.code, warning.page) == ("resolution_capped", 1)
    with pytest.raises(PageTooLarge):
        cut(source, [1], tmp_path / "cut.pdf", max_pixels=10_000)


def test_a_page_tree_that_lies_is_drawn_instead(tmp_path: Path) -> None:
    """One page object that the tree lists twice cannot be two pages with numbers of their own."""
    source = tmp_path / "loop.pdf"
    source.write_bytes(
        samples.pdf_bytes(
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Kids[3 0 R 3 0 R 3 0 R]/Count 3>>",
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R"
            b"/Resources<</Font<</F1 5 0 R>>>>>>",
            samples.stream(b"", samples.prose_stream()),
            samples.HELVETICA,
        )
    )
    cut(source, [1, 3], tmp_path / "cut.pdf")
    with pymupdf.open(tmp_path / "cut.pdf") as document:
        assert document.page_count == 2
    assert drawn(tmp_path / "cut.pdf", 2).getextrema()[0] < 100


def test_drawn_pages_get_the_resolution_and_quality_asked(tmp_path: Path) -> None:
    scan = heavy_scans.scan(tmp_path / "scan.pdf", 1)
    sizes = []
    for quality in (90, 35):
        cut(scan, [1], tmp_path / "cut.pdf", dpi=100, quality=quality)
        assert heavy_scans.picture_sizes(tmp_path / "cut.pdf") == [(850, 1100)]
        sizes.append((tmp_path / "cut.pdf").stat().st_size)
    assert sizes[1] < sizes[0] / 2


def test_what_cannot_be_opened_or_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.pdf").touch()
    (tmp_path / "bad.pdf").write_bytes(b"%PDF-1.7 nothing")
    source = samples.text_document(tmp_path / "a.pdf", 2)
    with pytest.raises(EmptyFile):
        cut(tmp_path / "empty.pdf", [1], tmp_path / "cut.pdf")
    with pytest.raises(CorruptPdf):
        cut(tmp_path / "bad.pdf", [1], tmp_path / "cut.pdf")
    with pytest.raises(PageUnrenderable) as caught:
        cut(source, [2, 3], tmp_path / "cut.pdf")
    assert caught.value.page == 3
