"""Page images: bad pages delay their own document, waiting is bounded, no child is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rag_service.api import page_images
from rag_service.api.page_images import PageImageRenderer
from rag_service.config.loader import load_settings
from rag_service.errors import Busy, NotFound, PageTimeout
from rag_service.knowledgebase.document_queries import StoredSource

PATIENCE = 60.0


class FakePdf:
    """Draws every page at once, except those of documents named `bad…`, which never end."""

    opened: ClassVar[list[str]] = []

    def __init__(self, *_: object) -> None:
        self._path = Path()

    async def open(self, path: Path, _: str) -> Any:
        self._path = path
        self.opened.append(path.name)
        return SimpleNamespace(pages=9)

    async def render(self, number: int, _: int) -> Any:
        if self._path.name.startswith("bad"):
            await asyncio.sleep(PATIENCE * 2)
        await asyncio.sleep(0)
        return SimpleNamespace(jpeg=f"{self._path.name} {number}".encode())

    def kill(self) -> None:
        self._path = Path()


class FakeStore:
    @contextmanager
    def open_local(self, key: str) -> Iterator[Path]:
        yield Path(key)


class Viewer:
    """Asks for pages."""

    def __init__(self) -> None:
        self.renderer = PageImageRenderer(load_settings())

    async def get(self, key: str, number: int = 1) -> bytes:
        source = StoredSource(key=key, media_type="application/pdf", filename="a.pdf")
        store: Any = FakeStore()
        return await self.renderer.render(store, source, number, 72, None)

    def start(self, key: str, number: int = 1) -> asyncio.Task[bytes]:
        return asyncio.create_task(self.get(key, number))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Viewer], Awaitable[None]]], None]:
    """A function that runs a test with a viewer, inside an event loop."""
    monkeypatch.setattr(page_images, "PdfSession", FakePdf)
    monkeypatch.setattr(FakePdf, "opened", [])

    async def with_viewer(work: Callable[[Viewer], Awaitable[None]]) -> None:
        viewer = Viewer()
        try:
            await asyncio.wait_for(work(viewer), PATIENCE)
        finally:
            await viewer.renderer.close()

    return lambda work: asyncio.run(with_viewer(work))


def test_a_good_page_does_not_wait_for_bad_ones_of_other_documents(run) -> None:
    async def work(viewer: Viewer) -> None:
        bad = [viewer.start(key, number) for key in ("bad1", "bad2") for number in (1, 2, 3)]
        await asyncio.sleep(0.05)
        assert await viewer.get("good") == b"good 1"
        assert not any(task.done() for task in bad)
        for task in bad:
            task.cancel()

    run(work)


def test_a_full_pool_refuses_after_a_while_and_a_long_queue_at_once(run, monkeypatch) -> None:
    monkeypatch.setattr(page_images, "_WAIT_SECONDS", 0.2)
    monkeypatch.setattr(page_images, "_MOST_WAITING", 2)

    async def work(viewer: Viewer) -> None:
        bad = [viewer.start(f"bad{n}") for n in range(3)]
        await asyncio.sleep(0.05)
        waiting = [viewer.start(f"good{n}") for n in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="2 page images are waiting"):
            await viewer.get("good")
        for task in waiting:
            with pytest.raises(Busy, match="All render processes are busy"):
                await task
        for task in bad:
            task.cancel()
        await asyncio.gather(*bad, return_exceptions=True)
        assert await viewer.get("good") == b"good 1"

    run(work)


def test_documents_that_were_slow_hold_one_child_together(run, monkeypatch) -> None:
    monkeypatch.setattr(page_images, "_DRAW_SECONDS", 0.05)
    monkeypatch.setattr(page_images, "_WAIT_SECONDS", 0.2)

    async def work(viewer: Viewer) -> None:
        keys = [f"bad{n}" for n in range(3)]
        first = await asyncio.gather(*map(viewer.get, keys), return_exceptions=True)
        assert [type(error) for error in first] == [PageTimeout] * 3
        viewer.renderer._draw_seconds = PATIENCE
        again = [viewer.start(key, 2) for key in keys]
        await asyncio.sleep(0.05)
        assert await viewer.get("good") == b"good 1"
        done, _ = await asyncio.wait(again, timeout=2)
        assert len(done) == 2
        assert all(isinstance(task.exception(), Busy) for task in done)
        for task in again:
            task.cancel()

    run(work)


def test_a_page_that_was_slow_is_not_tried_again_nor_a_whole_document_of_them(
    run, monkeypatch
) -> None:
    monkeypatch.setattr(page_images, "_DRAW_SECONDS", 0.05)

    async def work(viewer: Viewer) -> None:
        with pytest.raises(PageTimeout, match=r"longer than 0\.05 s"):
            await viewer.get("bad")
        with pytest.raises(PageTimeout, match="a moment ago"):
            await viewer.get("bad")
        for number in (2, 3):
            with pytest.raises(PageTimeout, match="longer than"):
                await viewer.get("bad", number)
        with pytest.raises(PageTimeout, match="3 pages of this document in a row"):
            await viewer.get("bad", 4)

    run(work)


def test_pages_of_one_document_are_drawn_by_the_child_that_has_it_open(run) -> None:
    async def work(viewer: Viewer) -> None:
        await viewer.get("b")
        assert await asyncio.gather(*(viewer.get("a", n) for n in range(1, 10))) == [
            f"a {n}".encode() for n in range(1, 10)
        ]
        assert FakePdf.opened == ["b", "a"]

    run(work)


def test_a_page_beyond_the_last_one_is_not_found(run) -> None:
    async def work(viewer: Viewer) -> None:
        for number in (0, 10):
            with pytest.raises(NotFound, match="9 pages"):
                await viewer.get("a", number)

    run(work)
