"""Slots for uploads: bounded in all and for each client, and never kept by an upload that ended."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from rag_service.api.upload_slots import UploadSlots
from rag_service.errors import BacklogFull


def test_one_client_leaves_slots_to_others() -> None:
    async def work() -> None:
        slots = UploadSlots(total=4, per_client=3, wait_seconds=0.01)
        async with AsyncExitStack() as held:
            for _ in range(3):
                await held.enter_async_context(slots.slot("a"))
            with pytest.raises(BacklogFull, match="3 uploads of this client"):
                await held.enter_async_context(slots.slot("a"))
            await held.enter_async_context(slots.slot("b"))
            with pytest.raises(BacklogFull, match="4 uploads are open"):
                await held.enter_async_context(slots.slot("c"))
        for client in "abcd":
            async with slots.slot(client):
                pass

    asyncio.run(work())


def test_a_slot_that_becomes_free_goes_to_one_that_waits() -> None:
    async def work() -> list[str]:
        slots = UploadSlots(total=1, per_client=1, wait_seconds=30)
        order: list[str] = []

        async def upload(name: str) -> None:
            async with slots.slot(name):
                order.append(name)
                await asyncio.sleep(0)

        await asyncio.gather(*(upload(name) for name in "abcde"))
        return order

    assert sorted(asyncio.run(work())) == list("abcde")


def test_a_failed_or_cancelled_upload_keeps_no_slot() -> None:
    async def work() -> None:
        slots = UploadSlots(total=1, per_client=1, wait_seconds=0.01)
        with pytest.raises(RuntimeError):
            async with slots.slot("a"):
                raise RuntimeError("failed")
        task = asyncio.create_task(_hold(slots))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with slots.slot("a"):
            pass

    asyncio.run(work())


async def _hold(slots: UploadSlots) -> None:
    async with slots.slot("a"):
        await asyncio.sleep(60)
