"""The reader of changes for event streams: one for all, and the newest version only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from rag_service.api import document_feed
from rag_service.api.document_feed import DocumentFeed

PATIENCE = 60.0


class Documents:
    """Documents by id, each with a status; counts its reads."""

    def __init__(self, **statuses: str) -> None:
        self.statuses = statuses
        self.reads: list[set[str]] = []
        self.error: Exception | None = None

    def read(self, ids: Collection[str]) -> dict[str, Any]:
        self.reads.append(set(ids))
        if self.error is not None:
            raise self.error
        return {one: _view(self.statuses[one]) for one in ids if one in self.statuses}


def _view(status: str) -> Any:
    return SimpleNamespace(
        latest_run=SimpleNamespace(status=status),
        model_dump=lambda exclude: {"status": status},
        model_dump_json=lambda: f'"{status}"',
    )


def run(monkeypatch: pytest.MonkeyPatch, work: Callable[[], Awaitable[None]]) -> None:
    monkeypatch.setattr(document_feed, "_POLL_SECONDS", 0.01)
    asyncio.run(asyncio.wait_for(work(), PATIENCE))


def test_all_streams_share_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = Documents(a="preparing", b="preparing")

    async def work() -> None:
        feed = DocumentFeed(documents.read)
        followers = [feed.follow(name) for name in "ab" * 30]
        versions = [await one.next(PATIENCE) for one in followers]
        assert {v.json for v in versions if v} == {'"preparing"'}
        assert len(documents.reads) < 5
        documents.statuses["a"] = "ocr"
        changed = [await one.next(PATIENCE) for one in followers[::2]]
        assert {v.json for v in changed if v} == {'"ocr"'}
        assert await followers[1].next(0.05) is None
        assert all(read == {"a", "b"} for read in documents.reads)
        feed.stop()

    run(monkeypatch, work)


def test_a_slow_follower_gets_only_the_newest_version(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = Documents(a="0")

    async def work() -> None:
        feed = DocumentFeed(documents.read)
        slow, quick = feed.follow("a"), feed.follow("a")
        await slow.next(PATIENCE)
        await quick.next(PATIENCE)
        for n in "1234":
            documents.statuses["a"] = n
            version = await quick.next(PATIENCE)
            assert version is not None
            assert version.json == f'"{n}"'
        version = await slow.next(PATIENCE)
        assert version is not None
        assert version.json == '"4"'
        feed.stop()

    run(monkeypatch, work)


def test_nothing_is_read_without_followers(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = Documents(a="queued")

    async def work() -> None:
        feed = DocumentFeed(documents.read)
        follower = feed.follow("a")
        await follower.next(PATIENCE)
        feed.leave(follower)
        await asyncio.sleep(0.1)
        reads = len(documents.reads)
        await asyncio.sleep(0.1)
        assert len(documents.reads) == reads
        again = feed.follow("a")
        assert await again.next(PATIENCE)
        feed.stop()

    run(monkeypatch, work)


def test_a_new_follower_is_given_what_is_read_after_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents = Documents(a="processed")

    async def work() -> None:
        monkeypatch.setattr(document_feed, "_POLL_SECONDS", PATIENCE)
        feed = DocumentFeed(documents.read)
        await feed.follow("a").next(PATIENCE)
        documents.statuses["a"] = "queued"
        version = await feed.follow("a").next(PATIENCE)
        assert version is not None
        assert version.json == '"queued"'
        feed.stop()

    run(monkeypatch, work)


def test_an_outage_keeps_open_streams_and_refuses_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents = Documents(a="queued")

    async def work() -> None:
        feed = DocumentFeed(documents.read)
        follower = feed.follow("a")
        await follower.next(PATIENCE)
        documents.error = OperationalError("SELECT", {}, ConnectionError("refused"))
        with pytest.raises(OperationalError):
            await feed.follow("a").next(PATIENCE)
        documents.error = None
        documents.statuses["a"] = "preparing"
        version = await follower.next(PATIENCE)
        assert version is not None
        assert version.json == '"preparing"'
        feed.stop()

    run(monkeypatch, work)


def test_a_defect_ends_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = Documents(a="queued")

    async def work() -> None:
        feed = DocumentFeed(documents.read)
        follower = feed.follow("a")
        await follower.next(PATIENCE)
        documents.error = ValueError("a defect")
        with pytest.raises(ValueError, match="a defect"):
            await follower.next(PATIENCE)
        feed.stop()

    run(monkeypatch, work)


def test_a_stop_ends_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = Documents(a="queued")

    async def work() -> None:
        feed = DocumentFeed(documents.read)
        follower = feed.follow("a")
        await follower.next(PATIENCE)
        feed.stop()
        assert await follower.next(PATIENCE) is None
        assert follower.is_closed
        assert feed.follow("a").is_closed

    run(monkeypatch, work)
