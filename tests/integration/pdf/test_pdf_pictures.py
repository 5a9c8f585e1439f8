"""Drawn pages and picture files as the OCR server gets them: size, rotation, colour, limits."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import pymupdf
import pytest
from PIL import Image, ImageDraw

from rag_service.errors import PageTooLarge, PageUnrenderable
from rag_service.pdf.results import PlannedPage, RenderedPage
from rag_service.pdf.session import PdfSession
from rag_service.states import OcrMode
from tests.fakes import pdf_samples as samples
from tests.fakes.opened import on

DARK, LIGHT = 90, 165
BLACK = (0, 0, 0)


def rendered(path: Path, number: int = 1, dpi: int = 150, **changes: Any) -> RenderedPage:
    return on(path, lambda session: session.render(number, dpi), **changes)


def planned(path: Path, mode: OcrMode = OcrMode.AUTO) -> list[PlannedPage]:
    async def work(session: PdfSession) -> list[PlannedPage]:
        preflight = await session.open(path, "")
        return [page async for page in session.plan(mode, range(1, preflight.pages + 1))]

    return on(path, work)


def picture(page: RenderedPage) -> Image.Image:
    image = Image.open(BytesIO(page.jpeg))
    image.load()
    assert (image.format, image.size) == ("JPEG", (page.width, page.height))
    return image


def marked(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """White, with a dark square in the top left corner."""
    image = Image.new(mode, (width, height), "white")
    ImageDraw.Draw(image).rectangle(
        (0, 0, min(width, height) // 4, min(width, height) // 4), "black"
    )
    return image


def corners(image: Image.Image) -> str:
    """Which corners are dark, clockwise from the top left."""
    grey, (right, bottom) = image.convert("L"), (image.width - 3, image.height - 3)
    return "".join(
        "x" if grey.getpixel(at) < DARK else "." if grey.getpixel(at) > LIGHT else "?"
        for at in ((2, 2), (right, 2), (right, bottom), (2, bottom))
    )


def pdf(
    path: Path, width: float, height: float, rotation: int = 0, colour: Any = (0, 0, 0)
) -> Path:
    """A page with a square in its unturned top left corner."""
    with pymupdf.open() as document:
        page = document.new_page(width=width, height=height)
        side = min(width, height) / 4
        page.draw_rect((0, 0, side, side), color=colour, fill=colour)
        page.set_rotation(rotation)
        document.save(path)
    return path


def test_a_page_has_the_pixels_its_dpi_gives(tmp_path: Path) -> None:
    page = rendered(pdf(tmp_path / "a4.pdf", 595.28, 841.89))
    assert abs(page.width - 1240) <= 1
    assert abs(page.height - 1754) <= 1
    assert (page.dpi, page.warnings) == (150, ())
    assert corners(picture(page)) == "x..."


def test_rotate_is_honoured(tmp_path: Path) -> None:
    page = rendered(pdf(tmp_path / "turned.pdf", 200, 400, rotation=90))
    assert page.width == 2 * page.height
    assert corners(picture(page)) == ".x.."


def test_only_a_page_without_colour_is_grey(tmp_path: Path) -> None:
    black = rendered(pdf(tmp_path / "black.pdf", 600, 800))
    assert black.grey
    assert picture(black).mode == "L"
    red = rendered(pdf(tmp_path / "red.pdf", 600, 800, colour=(0.8, 0, 0)))
    assert not red.grey
    assert picture(red).mode == "RGB"


def test_a_red_stamp_keeps_its_colour(tmp_path: Path) -> None:
    path = tmp_path / "stamp.pdf"
    with pymupdf.open() as document:
        page = document.new_page()
        page.insert_text((72, 90), samples.PROSE)
        page.insert_text((400, 700), "PAID", color=(0.9, 0.1, 0.1), fontsize=14)
        document.save(path)
    assert not rendered(path).grey


def test_a_child_does_not_grow_with_the_pages_it_has_drawn(tmp_path: Path) -> None:
    path = tmp_path / "scans.pdf"
    with pymupdf.open() as document:
        for number in range(10):
            image = marked(2550, 3300, "L")
            image.putpixel((9, 3000), number)
            out = BytesIO()
            image.save(out, "PNG", compress_level=1)
            document.new_page(width=612, height=792).insert_image((0, 0, 612, 792), stream=out)
        document.save(path)

    async def sizes(session: PdfSession) -> list[float]:
        found = []
        for number in range(1, 11):
            await session.render(number, 150)
            assert session._child._child is not None
            found.append(session._child._child.mib)
        return found

    grown = on(path, sizes)
    # A decoded page takes 8 MiB.
    assert grown[-1] - grown[1] < 20


def test_pixels_are_capped_before_drawing(tmp_path: Path) -> None:
    page = rendered(pdf(tmp_path / "large.pdf", 2000, 1000), max_pixels=1_000_000)
    assert page.width * page.height <= 1_010_000
    assert page.dpi == pytest.approx(50.9, abs=0.2)
    assert [warning.code for warning in page.warnings] == ["resolution_capped"]


def test_a_page_with_under_50_dpi_left_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PageTooLarge, match="28 x 14 inches"):
        rendered(pdf(tmp_path / "giant.pdf", 2000, 1000), max_pixels=900_000)


def test_a_page_of_three_points_is_still_a_picture(tmp_path: Path) -> None:
    page = rendered(pdf(tmp_path / "tiny.pdf", 3, 3))
    assert min(page.width, page.height) >= 32
    sliver = rendered(pdf(tmp_path / "sliver.pdf", 3, 14_000))
    assert min(sliver.width, sliver.height) >= 32


def test_a_page_that_does_not_exist_is_an_error_of_that_page(tmp_path: Path) -> None:
    path = pdf(tmp_path / "one.pdf", 100, 100)
    with pytest.raises(PageUnrenderable) as caught:
        rendered(path, number=2)
    assert caught.value.page == 2


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_picture_files_are_pages_for_ocr(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "scan"
    marked(400, 300).save(path, kind)
    (page,) = planned(path)
    assert (page.plan, page.no_text) == ("ocr", False)
    sent = rendered(path)
    assert (sent.width, sent.height, sent.grey) == (400, 300, True)
    assert corners(picture(sent)) == "x..."


def test_every_page_of_a_tiff_is_read(tmp_path: Path) -> None:
    path = tmp_path / "scan.tiff"
    pages = [Image.new("1", (300, 200), 1), marked(200, 300, "L"), marked(400, 100)]
    pages[0].save(path, save_all=True, append_images=pages[1:])
    assert [page.plan for page in planned(path)] == ["blank", "ocr", "ocr"]
    assert [(p.width, p.height) for p in (rendered(path, n) for n in (3, 2))] == [
        (400, 100), (200, 300),
    ]  # fmt: skip


def test_exif_orientation_stands_the_picture_upright(tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6
    marked(400, 200).save(path, exif=exif)
    page = rendered(path)
    assert (page.width, page.height) == (200, 400)
    assert corners(picture(page)) == ".x.."
    (plan,) = planned(path)
    assert plan.height_pt == 2 * plan.width_pt


def test_transparency_is_white_paper(tmp_path: Path) -> None:
    path = tmp_path / "alpha.png"
    image = Image.new("RGBA", (100, 100), (0, 0, 0, 0))
    ImageDraw.Draw(image).rectangle((0, 0, 30, 30), (0, 0, 0, 255))
    image.save(path)
    assert corners(picture(rendered(path))) == "x..."
    Image.new("RGBA", (100, 100), (0, 0, 0, 0)).save(path)
    assert [page.plan for page in planned(path)] == ["blank"]


def test_sixteen_bit_scans_keep_their_greys(tmp_path: Path) -> None:
    path = tmp_path / "deep.png"
    deep = Image.new("I;16", (64, 64), 65535)
    deep.paste(0, (0, 0, 20, 20))
    deep.save(path)
    assert corners(picture(rendered(path))) == "x..."


def test_a_scan_is_sent_at_the_wanted_dpi_of_its_paper(tmp_path: Path) -> None:
    path = tmp_path / "scan.png"
    marked(2480, 3508, "L").save(path, dpi=(300, 300))
    page = rendered(path, dpi=150)
    assert (page.width, page.height, page.dpi) == (1240, 1754, 150)
    (plan,) = planned(path)
    assert plan.width_pt == pytest.approx(595, abs=1)


def test_a_photo_without_a_paper_size_is_sent_as_a3_at_most(tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    marked(4000, 3000).save(path, dpi=(72, 72))
    page = rendered(path, dpi=150)
    assert (page.width, page.height) == (2481, 1861)
    assert page.warnings == ()


def test_a_picture_that_memory_cannot_hold_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    Image.new("1", (20_000, 20_000)).save(path)
    with pytest.raises(PageTooLarge, match="20000 x 20000"):
        rendered(path, child_max_mib=100)


def test_a_picture_that_ends_early_is_an_error_of_that_page(tmp_path: Path) -> None:
    path = tmp_path / "cut.jpg"
    whole = BytesIO()
    Image.effect_noise((400, 400), 80).save(whole, "JPEG")
    path.write_bytes(whole.getvalue()[:4000])
    (page,) = planned(path)
    assert page.error is not None
    assert page.error.code == "page_unrenderable"
    with pytest.raises(PageUnrenderable):
        rendered(path)


def test_without_ocr_a_picture_has_no_text(tmp_path: Path) -> None:
    path = tmp_path / "scan.png"
    marked(100, 100).save(path)
    (page,) = planned(path, OcrMode.OFF)
    assert page.no_text
    assert [warning.code for warning in page.warnings] == ["page_without_text"]
