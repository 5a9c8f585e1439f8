"""Work under a request key: one owner at a time, taken over without heartbeats, kept until ttl."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from rag_service.config.loader import load_settings
from rag_service.config.options import HandlerOptions
from rag_service.runpod.job_format import PageOutput, PageProblem
from workers.runpod_handler.faults import ClaimLost
from workers.runpod_handler.volume import Claim, Volume

KEY = "run:options:pages"
TTL = 3600.0


def handler_settings(volume: Path, **changes: float) -> HandlerOptions:
    quick = {"heartbeat": 0.05, "stale_after": 0.5, **changes}
    return load_settings().handler.model_copy(update={"volume": volume, **quick})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "rag_service"


@pytest.fixture
def volume(folder: Path) -> Volume:
    return Volume(handler_settings(folder), TTL)


async def hold(volume: Volume, working: asyncio.Event, until: asyncio.Event) -> None:
    async with volume.claimed(KEY):
        working.set()
        await until.wait()


async def abandoned(volume: Volume) -> Claim:
    """A claim whose owner died without a release."""
    held = volume.claimed(KEY)
    claim = await held.__aenter__()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    return claim


def test_pages_without_error_are_kept_for_the_next_claim(volume: Volume) -> None:
    good = PageOutput(page=3, markdown="text", finish_reason="stop")
    bad = PageOutput(page=4, error=PageProblem(code="ocr_rejected", message="no"))

    async def scenario() -> dict[int, PageOutput]:
        async with volume.claimed(KEY) as claim:
            assert claim.pages() == {}
            await claim.keep(good)
            await claim.keep(bad)
        async with volume.claimed(KEY) as claim:
            return claim.pages()

    assert asyncio.run(scenario()) == {3: good}


def test_keys_do_not_share_pages(volume: Volume) -> None:
    async def scenario() -> dict[int, PageOutput]:
        async with volume.claimed(KEY) as claim:
            await claim.keep(PageOutput(page=1))
            async with volume.claimed("../" + KEY) as other:
                return other.pages()

    assert asyncio.run(scenario()) == {}


def test_a_second_job_waits_while_the_first_sends_heartbeats(volume: Volume) -> None:
    async def scenario() -> None:
        working, until, second = asyncio.Event(), asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(hold(volume, working, until))
        await working.wait()
        waiting = asyncio.create_task(hold(volume, second, until))
        # Three times as long as it would wait for a heartbeat.
        await asyncio.sleep(1.5)
        assert not second.is_set()
        until.set()
        await asyncio.gather(first, waiting)
        assert second.is_set()

    asyncio.run(scenario())


def test_a_job_takes_over_from_an_owner_without_heartbeats(volume: Volume) -> None:
    async def scenario() -> None:
        lost = await abandoned(volume)
        async with volume.claimed(KEY) as claim:
            await claim.require_valid()
            with pytest.raises(ClaimLost):
                await lost.require_valid()
            with pytest.raises(ClaimLost):
                await lost.keep(PageOutput(page=1))
            lost.release()
            await claim.require_valid()

    asyncio.run(scenario())


def test_only_one_of_many_waiting_jobs_takes_over(volume: Volume) -> None:
    working, most = 0, 0

    async def take() -> None:
        nonlocal working, most
        async with volume.claimed(KEY) as claim:
            working += 1
            most = max(most, working)
            await claim.require_valid()
            await asyncio.sleep(0.02)
            working -= 1

    async def scenario() -> None:
        await abandoned(volume)
        await asyncio.gather(*(take() for _ in range(6)))

    asyncio.run(scenario())
    assert most == 1


def test_a_cancelled_owner_frees_its_key(volume: Volume) -> None:
    async def scenario() -> None:
        working = asyncio.Event()
        first = asyncio.create_task(hold(volume, working, asyncio.Event()))
        await working.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        # The heartbeat is not stale yet, so only the release frees the key.
        async with asyncio.timeout(30), slow.claimed(KEY):
            pass

    slow = volume
    slow._handler = slow._handler.model_copy(update={"stale_after": 600.0})
    asyncio.run(scenario())


def test_a_stored_page_that_cannot_be_read_is_read_again(volume: Volume, folder: Path) -> None:
    async def scenario() -> dict[int, PageOutput]:
        async with volume.claimed(KEY) as claim:
            await claim.keep(PageOutput(page=1))
            await claim.keep(PageOutput(page=2))
            (stored,) = folder.glob("keys/*/page-000002.json")
            stored.write_text('{"page": 2, "markd')
            return claim.pages()

    assert list(asyncio.run(scenario())) == [1]


@pytest.mark.parametrize(("age", "kept"), [(TTL / 2, True), (TTL * 2, False)])
def test_a_keys_work_is_kept_for_its_ttl(
    volume: Volume, folder: Path, age: float, kept: bool
) -> None:
    async def work(key: str) -> None:
        async with volume.claimed(key) as claim:
            await claim.keep(PageOutput(page=1))

    asyncio.run(work(KEY))
    (old,) = (folder / "keys").iterdir()
    for path in (*old.iterdir(), old):
        os.utime(path, (time.time() - age,) * 2)
    asyncio.run(work("another"))
    assert old.exists() is kept


def test_without_a_volume_nothing_is_kept(tmp_path: Path) -> None:
    volume = Volume(handler_settings(tmp_path / "absent" / "rag_service"), TTL)

    async def scenario() -> dict[int, PageOutput]:
        async with volume.claimed(KEY) as first, volume.claimed(KEY) as second:
            await first.require_valid()
            await first.keep(PageOutput(page=1))
            return second.pages()

    assert asyncio.run(scenario()) == {}
    assert list(tmp_path.iterdir()) == []
