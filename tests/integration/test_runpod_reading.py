"""Pages of a job's document, by their numbers in the whole document."""

from __future__ import annotations

from pathlib import Path

import pytest

from rag_service.errors import PageTimeout
from rag_service.pdf.session import PdfSession
from tests.fakes import pdf_samples as samples
from tests.fakes.opened import on
from workers.runpod_handler.page_reading import JobPages

WHOLE = (0, 0, 1000, 1000)


def test_pages_have_their_original_numbers(tmp_path: Path) -> None:
    path = samples.joined(tmp_path / "some.pdf", samples.prose_page(), samples.prose_page("x"))

    async def work(session: PdfSession) -> None:
        document = JobPages(session, [5, 9])
        assert (await document.render(9, 72)).number == 9
        assert (await document.layout_picture(9, 72)).number == 9
        assert await document.crops(9, 72, [WHOLE]) == await session.crops(2, 72, [WHOLE])

    on(path, work)


def test_errors_name_the_original_page(tmp_path: Path) -> None:
    path = tmp_path / "hang.pdf"
    path.write_bytes(samples.endless_page())

    async def work(session: PdfSession) -> None:
        document = JobPages(session, [40])
        for read in (
            lambda: document.render(40, 72),
            lambda: document.layout_picture(40, 72),
            lambda: document.crops(40, 72, [WHOLE]),
        ):
            with pytest.raises(PageTimeout, match=r"^Page 40 ") as caught:
                await read()
            assert caught.value.page == 40

    on(path, work, page_time_limit=0.5)
