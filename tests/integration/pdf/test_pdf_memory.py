"""A render child stays within pdf.child_max_mib; each page of a TIFF file is that page."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rag_service.config.loader import load_settings
from rag_service.errors import PageTooLarge, RagServiceError
from rag_service.pdf.results import PlannedPage
from rag_service.pdf.session import PdfSession
from rag_service.states import OcrMode
from tests.fakes.nested_pages import nested


def on(
    path: Path, media_type: str, work: Callable[[PdfSession], Awaitable[Any]], **limits: Any
) -> Any:
    """Call work(session) with the file open."""

    async def opened() -> Any:
        options = load_settings().pdf.model_copy(update=limits)
        async with PdfSession(options, 5000) as session:
            await session.open(path, media_type)
            return await work(session)

    return asyncio.run(opened())


async def planned(session: PdfSession, pages: Sequence[int]) -> list[PlannedPage]:
    return [page async for page in session.plan(OcrMode.FORCE, pages)]


def peak_mib(session: PdfSession) -> int:
    assert session._child.pid is not None
    lines = Path(f"/proc/{session._child.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) // 1024


def test_a_picture_that_needs_more_fails_by_name_and_the_child_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    Image.new("RGB", (9000, 9000)).save(path)

    async def work(session: PdfSession) -> tuple[str | None, int]:
        with pytest.raises(PageTooLarge, match=r"Page 1 .*pdf\.child_max_mib, 250 MiB"):
            await session.render(1, 150)
        (page,) = await planned(session, [1])
        return page.error and page.error.code, peak_mib(session)

    code, peak = on(path, "image/png", work, child_max_mib=250)
    assert code == "page_too_large"
    assert peak <= 250

    async def draw(session: PdfSession) -> int:
        return (await session.render(1, 150)).width

    assert on(path, "image/png", draw, child_max_mib=800) > 0


def test_a_page_that_fills_the_memory_costs_no_other_page(tmp_path: Path) -> None:
    """200 times a picture of 60,000 x 60,000 pixels, then a page of prose."""
    path = tmp_path / "bomb.pdf"
    path.write_bytes(nested("image_bomb", 2, good=(2,)))

    async def work(session: PdfSession) -> tuple[str | None, int]:
        with pytest.raises(RagServiceError):
            await session.render(1, 150)
        _, good = await planned(session, [1, 2])
        assert (await session.render(2, 72)).jpeg
        return good.error and good.error.code, peak_mib(session)

    code, peak = on(path, "application/pdf", work, child_max_mib=300, page_time_limit=4)
    assert code is None
    assert peak <= 300


def test_every_page_of_a_long_tiff_file_is_that_page(tmp_path: Path) -> None:
    path = tmp_path / "long.tiff"
    sizes = [(200 + number, 300) for number in range(40)]
    frames = [Image.new("L", size, 255 if index % 3 else 0) for index, size in enumerate(sizes)]
    frames[0].save(path, save_all=True, append_images=frames[1:], dpi=(72, 72))
    order = [*range(40, 0, -1), 7, 7, 30]

    async def work(session: PdfSession) -> list[tuple[float, int]]:
        pages = await planned(session, order)
        drawn = [(await session.render(number, 72)).width for number in order]
        return list(zip((page.width_pt for page in pages), drawn, strict=True))

    found = on(path, "image/tiff", work)
    assert found == [(sizes[number - 1][0], sizes[number - 1][0]) for number in order]
