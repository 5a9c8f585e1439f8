"""The time of a document's pages together is bounded, also over several turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rag_service.config.loader import load_settings
from rag_service.errors import PageTimeout
from rag_service.pdf.results import PlannedPage
from rag_service.pdf.session import PdfSession
from rag_service.runtime.time_spent import TimeSpent
from rag_service.states import OcrMode
from tests.fakes.nested_pages import nested

PDF = "application/pdf"


def on(path: Path, work: Any, spent: TimeSpent | None, **limits: Any) -> Any:
    """Call work(session) with the file open."""

    async def opened() -> Any:
        options = load_settings().pdf.model_copy(update=limits)
        async with PdfSession(options, 5000) as session:
            await session.open(path, PDF, spent=spent)
            return await work(session)

    return asyncio.run(opened())


def planning(pages: Sequence[int], mode: OcrMode = OcrMode.AUTO) -> Any:
    async def plan(session: PdfSession) -> list[PlannedPage]:
        return [page async for page in session.plan(mode, pages)]

    return plan


def outcome(page: PlannedPage) -> str:
    return page.error.code if page.error else page.plan


@pytest.mark.parametrize("kind", ["text", "drawing", "pattern", "soft_mask", "type3"])
def test_a_nested_page_of_any_kind_ends_in_time_and_costs_no_other(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / f"{kind}.pdf"
    path.write_bytes(nested(kind, 2, good=(2,)))

    async def work(session: PdfSession) -> tuple[list[str], float]:
        pages = await planning([1, 2], OcrMode.FORCE)(session)
        return [outcome(page) for page in pages], session.spent.seconds

    (first, second), seconds = on(path, work, TimeSpent(), page_time_limit=1)
    assert first in {"page_timeout", "page_unrenderable", "page_too_large", "ocr"}
    assert second == "ocr"
    assert seconds < 10


def test_pages_beyond_the_time_of_the_document_are_failed_by_name(tmp_path: Path) -> None:
    path = tmp_path / "good.pdf"
    path.write_bytes(nested("text", 3, good=(1, 2, 3)))

    async def work(session: PdfSession) -> tuple[list[PlannedPage], str]:
        pages = await planning([1, 2, 3])(session)
        with pytest.raises(PageTimeout) as late:
            await session.render(1, 72)
        return pages, late.value.message

    pages, message = on(path, work, TimeSpent(seconds=606.0))
    assert [outcome(page) for page in pages] == ["page_timeout"] * 3
    assert "Page 1 was not tried" in message
    assert "pdf.document_time_base" in message
    assert "606 s" in message
    for unbounded in (None, TimeSpent(seconds=500.0)):
        pages = on(path, planning([1, 2, 3]), unbounded)
        assert [outcome(page) for page in pages] == ["native"] * 3


def test_late_pages_of_an_earlier_turn_count_on(tmp_path: Path) -> None:
    path = tmp_path / "bad.pdf"
    path.write_bytes(nested("text", 4))

    async def work(session: PdfSession) -> tuple[list[str], TimeSpent]:
        pages = await planning([1, 2, 3, 4])(session)
        return [str(page.error) for page in pages], session.spent

    messages, spent = on(path, work, TimeSpent(40.0, 4, 4), page_time_limit=3.0)
    assert ["not tried" in message for message in messages] == [False, True, True, True]
    assert (spent.late_pages, spent.late_texts) == (5, 5)
    assert spent.seconds > 40


def test_good_pages_before_a_slow_one_arrive_before_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "mixed.pdf"
    path.write_bytes(nested("text", 4, good=(1, 2, 3)))

    async def work(session: PdfSession) -> tuple[list[int], bool]:
        plan = session.plan(OcrMode.AUTO, [1, 2, 3, 4])
        first = [(await anext(plan)).number for _ in range(3)]
        is_at_work = session._turn.locked()
        await plan.aclose()
        return first, is_at_work

    assert on(path, work, None, page_time_limit=60) == ([1, 2, 3], True)
