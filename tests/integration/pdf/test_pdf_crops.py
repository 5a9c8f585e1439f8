"""Pictures for pages read by regions: for the layout, for OCR, for people."""

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
    """The box of one of the page's four bands, a little inside it."""
    return 100, 250 * number + 20, 900, 250 * number + 230


def bands(colours: tuple[Any, ...] = GREYS, mode: str = "L") -> Image.Image:
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


def test_a_layout_picture_is_small_and_names_the_pages_size(tmp_path: Path) -> None:
    path = tmp_path / "page.pdf"
    path.write_bytes(samples.prose_page())
    page = on(path, lambda session: session.layout_picture(1, 300))
    assert (page.number, page.width, page.height, page.dpi) == (1, 2550, 3300, 300)
    assert (page.grey, page.warnings) == (True, ())
    small = pixels(page)
    assert (small.mode, small.size) == ("L", (800, 1035))


def test_a_page_drawn_coarser_carries_a_warning(tmp_path: Path) -> None:
    path = scan(tmp_path / "bands.tiff", bands())
    page = on(path, lambda session: session.layout_picture(1, DPI), max_pixels=500_000)
    assert page.width * page.height <= 501_000
    assert [warning.code for warning in page.warnings] == ["resolution_capped"]


def test_crops_come_in_the_order_of_their_boxes(tmp_path: Path) -> None:
    path = scan(tmp_path / "bands.tiff", bands())
    order = [2, 0, 3, 1, 0]
    crops = on(path, lambda session: session.crops(1, DPI, [band(n) for n in order]))
    assert all(near(middle(crop), GREYS[n]) for crop, n in zip(crops, order, strict=True))
    # 992 x 369 pixels of the page, in whole tokens.
    assert {(crop.width, crop.height) for crop in crops} == {(980, 364)}
    assert {pixels(crop).mode for crop in crops} == {"L"}


def test_a_crop_shows_its_box_and_nothing_beyond_it(tmp_path: Path) -> None:
    image = Image.new("L", (1000, 1000), "white")
    image.paste(0, (200, 300, 480, 580))
    path = scan(tmp_path / "square.tiff", image)
    crop, more = on(
        path, lambda session: session.crops(1, DPI, [(200, 300, 480, 580), (172, 300, 480, 580)])
    )
    assert (crop.width, crop.height) == (280, 280)
    assert pixels(crop).getextrema()[1] < 20
    assert pixels(more).crop((0, 0, 20, 280)).getextrema()[0] > 230


def test_colour_stays_where_the_page_has_colour(tmp_path: Path) -> None:
    colours = ((200, 30, 30), (30, 160, 30), (30, 30, 200), (120, 120, 120))
    path = scan(tmp_path / "bands.tiff", bands(colours, "RGB"))
    crops = on(path, lambda session: session.crops(1, DPI, [band(n) for n in range(4)]))
    assert all(near(middle(crop), colour) for crop, colour in zip(crops, colours, strict=True))


def test_a_crop_has_the_least_and_the_most_pixels_of_the_settings(tmp_path: Path) -> None:
    path = scan(tmp_path / "bands.tiff", bands())
    small, large = on(
        path, lambda session: session.crops(1, DPI, [(0, 0, 1, 1), WHOLE]),
        crop_min_pixels=50_000, crop_max_side=500,
    )  # fmt: skip
    assert small.width * small.height >= 50_000
    assert max(large.width, large.height) == 476


def test_a_page_without_boxes_has_no_crops(tmp_path: Path) -> None:
    assert (
        on(scan(tmp_path / "bands.tiff", bands()), lambda session: session.crops(1, 50, [])) == []
    )


def test_an_unscaled_crop_has_the_pixels_of_the_page(tmp_path: Path) -> None:
    path = scan(tmp_path / "bands.tiff", bands())
    crop = on(path, lambda session: session.unscaled_crop(1, DPI, (500, 500, 510, 510)))
    assert (crop.width, crop.height) == (12, 17)
    assert near(middle(crop), GREYS[2])


def test_a_child_killed_before_the_crops_loses_nothing(tmp_path: Path) -> None:
    path = scan(tmp_path / "bands.tiff", bands(), bands(GREYS[::-1]))

    async def work(session: PdfSession) -> list[Crop]:
        await session.layout_picture(2, DPI)
        assert session._child.pid is not None
        os.kill(session._child.pid, signal.SIGKILL)
        return await session.crops(2, DPI, [band(0), band(3)])

    first, last = on(path, work)
    assert near(middle(first), GREYS[3])
    assert near(middle(last), GREYS[0])


async def outcome(work: Awaitable[list[Crop]]) -> Any:
    try:
        return round(middle((await work)[0]) / 80)
    except PageUnrenderable as error:
        return error.code


def test_a_page_drawn_for_its_layout_is_kept_while_memory_lasts(tmp_path: Path) -> None:
    path = scan(tmp_path / "pages.tiff", *(bands((80 * n,) * 4) for n in range(3)))

    async def crops_without_the_file(session: PdfSession) -> list[Any]:
        for number in (1, 2, 3):
            await session.layout_picture(number, DPI)
        stored = path.read_bytes()
        path.write_bytes(b"")
        try:
            return [await outcome(session.crops(n, DPI, [WHOLE])) for n in (3, 2, 1)]
        finally:
            path.write_bytes(stored)

    # A grey page takes 2.1 MiB.
    assert on(path, crops_without_the_file) == [2, 1, 0]
    assert on(path, crops_without_the_file, raster_cache_mib=5) == [2, 1, "page_unrenderable"]
    assert on(path, crops_without_the_file, raster_cache_mib=1) == [2] + ["page_unrenderable"] * 2


def test_no_crop_shows_the_document_before(tmp_path: Path) -> None:
    first = scan(tmp_path / "first.tiff", bands((0,) * 4))
    second = scan(tmp_path / "second.tiff", bands((240,) * 4))

    async def work(session: PdfSession) -> list[Crop]:
        await session.layout_picture(1, DPI)
        await session.open(second, "")
        return await session.crops(1, DPI, [WHOLE])

    (crop,) = on(first, work)
    assert near(middle(crop), 240)


def requests(session: PdfSession, number: int) -> list[Callable[[], Awaitable[object]]]:
    return [
        lambda: session.layout_picture(number, 72),
        lambda: session.crops(number, 72, [WHOLE]),
        lambda: session.unscaled_crop(number, 72, WHOLE),
    ]


async def errors(session: PdfSession, number: int, kind: type[PageError]) -> list[int | None]:
    found = []
    for ask in requests(session, number):
        with pytest.raises(kind) as caught:
            await ask()
        found.append(caught.value.page)
    return found


def test_a_page_that_cannot_be_drawn_is_the_error_of_that_page(tmp_path: Path) -> None:
    path = samples.joined(tmp_path / "hang.pdf", samples.prose_page(), samples.endless_page())

    async def work(session: PdfSession) -> None:
        assert await errors(session, 2, PageTimeout) == [2, 2, 2]
        assert await errors(session, 7, PageUnrenderable) == [7, 7, 7]
        assert (await session.layout_picture(1, 72)).number == 1

    on(path, work, page_time_limit=1)


def test_a_page_too_large_to_draw_is_the_error_of_that_page(tmp_path: Path) -> None:
    path = tmp_path / "page.pdf"
    path.write_bytes(samples.prose_page())
    assert on(path, lambda session: errors(session, 1, PageTooLarge), max_pixels=100_000) == [
        1,
        1,
        1,
    ]
