"""Pages read by their parts: a look for the layout, crops for OCR, a part for a reader."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rag_service.errors import PageError, PageTimeout, PageTooLarge, PageUnrenderable
from rag_service.pdf.results import Crop, PagePicture
from rag_service.pdf.session import PdfSession
from tests.fakes import pdf_samples as samples
from tests.fakes.opened import on

DPI = 150
GREYS = (0, 80, 160, 240)
WHOLE = (0, 0, 1000, 1000)


def band(number: int) -> tuple[int, int, int, int]:
    """The box of one of the sheet's four bands, a little inside it."""
    return 100, 250 * number + 20, 900, 250 * number + 230


def sheet(colours: tuple[Any, ...] = GREYS, mode: str = "L") -> Image.Image:
    """A4 at 150 DPI in four bands, from top to bottom."""
    image = Image.new(mode, (1240, 1754))
    for number, colour in enumerate(colours):
        image.paste(colour, (0, round(438.5 * number), 1240, round(438.5 * (number + 1))))
    return image


def scan(path: Path, *images: Image.Image) -> Path:
    images[0].save(path, "TIFF", save_all=True, append_images=images[1:], dpi=(DPI, DPI))
    return path


def pixels(found: Crop | PagePicture) -> Image.Image:
    image = Image.open(BytesIO(found.jpeg))
    image.load()
    assert image.format == "JPEG"
    return image


def middle(crop: Crop) -> Any:
    image = pixels(crop)
    assert image.size == (crop.width, crop.height)
    return image.getpixel((crop.width // 2, crop.height // 2))


def near(found: Any, wanted: Any) -> bool:
    pair = zip(found, wanted, strict=True) if isinstance(wanted, tuple) else [(found, wanted)]
    return all(abs(one - other) <= 6 for one, other in pair)


def test_a_look_is_small_and_says_how_large_the_page_is(tmp_path: Path) -> None:
    path = tmp_path / "page.pdf"
    path.write_bytes(samples.prose_page())
    page = on(path, lambda worker: worker.look(1, 300))
    assert (page.number, page.width, page.height, page.dpi) == (1, 2550, 3300, 300)
    assert (page.grey, page.warnings) == (True, ())
    small = pixels(page)
    assert (small.mode, small.size) == ("L", (800, 1035))


def test_a_page_that_is_drawn_coarser_says_so(tmp_path: Path) -> None:
    path = scan(tmp_path / "sheet.tiff", sheet())
    page = on(path, lambda worker: worker.look(1, DPI), max_pixels=500_000)
    assert page.width * page.height <= 501_000
    assert [warning.code for warning in page.warnings] == ["resolution_capped"]


def test_crops_come_in_the_order_of_their_boxes(tmp_path: Path) -> None:
    path = scan(tmp_path / "sheet.tiff", sheet())
    order = [2, 0, 3, 1, 0]
    crops = on(path, lambda worker: worker.crops(1, DPI, [band(n) for n in order]))
    assert all(near(middle(crop), GREYS[n]) for crop, n in zip(crops, order, strict=True))
    # 992 x 369 pixels of the page, in whole tokens.
    assert {(crop.width, crop.height) for crop in crops} == {(980, 364)}
    assert {pixels(crop).mode for crop in crops} == {"L"}


def test_a_crop_shows_its_box_and_nothing_beyond_it(tmp_path: Path) -> None:
    image = Image.new("L", (1000, 1000), "white")
    image.paste(0, (200, 300, 480, 580))
    path = scan(tmp_path / "square.tiff", image)
    crop, more = on(
        path, lambda worker: worker.crops(1, DPI, [(200, 300, 480, 580), (172, 300, 480, 580)])
    )
    assert (crop.width, crop.height) == (280, 280)
    assert pixels(crop).getextrema()[1] < 20
    assert pixels(more).crop((0, 0, 20, 280)).getextrema()[0] > 230


def test_colour_stays_where_the_page_has_colour(tmp_path: Path) -> None:
    colours = ((200, 30, 30), (30, 160, 30), (30, 30, 200), (120, 120, 120))
    path = scan(tmp_path / "sheet.tiff", sheet(colours, "RGB"))
    crops = on(path, lambda worker: worker.crops(1, DPI, [band(n) for n in range(4)]))
    assert all(near(middle(crop), colour) for crop, colour in zip(crops, colours, strict=True))


def test_a_crop_has_the_least_and_the_most_pixels_of_the_settings(tmp_path: Path) -> None:
    path = scan(tmp_path / "sheet.tiff", sheet())
    small, large = on(
        path, lambda worker: worker.crops(1, DPI, [(0, 0, 1, 1), WHOLE]),
        crop_min_pixels=50_000, crop_max_side=500,
    )  # fmt: skip
    assert small.width * small.height >= 50_000
    assert max(large.width, large.height) == 476


def test_a_page_without_boxes_has_no_crops(tmp_path: Path) -> None:
    assert on(scan(tmp_path / "sheet.tiff", sheet()), lambda worker: worker.crops(1, 50, [])) == []


def test_a_part_for_a_reader_has_the_pixels_of_the_page(tmp_path: Path) -> None:
    path = scan(tmp_path / "sheet.tiff", sheet())
    part = on(path, lambda worker: worker.part(1, DPI, (500, 500, 510, 510)))
    assert (part.width, part.height) == (12, 17)
    assert near(middle(part), GREYS[2])


def test_a_child_killed_between_look_and_crops_loses_nothing(tmp_path: Path) -> None:
    path = scan(tmp_path / "sheet.tiff", sheet(), sheet(GREYS[::-1]))

    async def work(worker: PdfSession) -> list[Crop]:
        await worker.look(2, DPI)
        assert worker._child is not None
        os.kill(worker._child.pid, signal.SIGKILL)
        return await worker.crops(2, DPI, [band(0), band(3)])

    first, last = on(path, work)
    assert near(middle(first), GREYS[3])
    assert near(middle(last), GREYS[0])


async def outcome(work: Awaitable[list[Crop]]) -> Any:
    try:
        return round(middle((await work)[0]) / 80)
    except PageUnrenderable as error:
        return error.code


def test_a_page_that_was_looked_at_is_not_drawn_again_while_memory_lasts(tmp_path: Path) -> None:
    path = scan(tmp_path / "sheets.tiff", *(sheet((80 * n,) * 4) for n in range(3)))

    async def crops_without_the_file(worker: PdfSession) -> list[Any]:
        for number in (1, 2, 3):
            await worker.look(number, DPI)
        hidden = path.rename(path.with_suffix(".away"))
        try:
            return [await outcome(worker.crops(n, DPI, [WHOLE])) for n in (3, 2, 1)]
        finally:
            hidden.rename(path)

    # A grey sheet takes 2.1 MiB.
    assert on(path, crops_without_the_file) == [2, 1, 0]
    assert on(path, crops_without_the_file, raster_cache_mib=5) == [2, 1, "page_unrenderable"]
    assert on(path, crops_without_the_file, raster_cache_mib=1) == [2] + ["page_unrenderable"] * 2


def test_no_crop_shows_the_document_before(tmp_path: Path) -> None:
    first = scan(tmp_path / "first.tiff", sheet((0,) * 4))
    second = scan(tmp_path / "second.tiff", sheet((240,) * 4))

    async def work(worker: PdfSession) -> list[Crop]:
        await worker.look(1, DPI)
        await worker.open(second, "")
        return await worker.crops(1, DPI, [WHOLE])

    (crop,) = on(first, work)
    assert near(middle(crop), 240)


def both(worker: PdfSession, number: int) -> list[Callable[[], Awaitable[object]]]:
    return [
        lambda: worker.look(number, 72),
        lambda: worker.crops(number, 72, [WHOLE]),
        lambda: worker.part(number, 72, WHOLE),
    ]


async def errors(worker: PdfSession, number: int, kind: type[PageError]) -> list[int | None]:
    found = []
    for ask in both(worker, number):
        with pytest.raises(kind) as caught:
            await ask()
        found.append(caught.value.page)
    return found


def test_a_page_that_cannot_be_drawn_is_the_error_of_that_page(tmp_path: Path) -> None:
    path = samples.joined(tmp_path / "hang.pdf", samples.prose_page(), samples.endless_page())

    async def work(worker: PdfSession) -> None:
        assert await errors(worker, 2, PageTimeout) == [2, 2, 2]
        assert await errors(worker, 7, PageUnrenderable) == [7, 7, 7]
        assert (await worker.look(1, 72)).number == 1

    on(path, work, page_time_limit=1)


def test_a_page_too_large_to_draw_is_the_error_of_that_page(tmp_path: Path) -> None:
    path = tmp_path / "page.pdf"
    path.write_bytes(samples.prose_page())
    assert on(path, lambda worker: errors(worker, 1, PageTooLarge), max_pixels=100_000) == [1, 1, 1]
