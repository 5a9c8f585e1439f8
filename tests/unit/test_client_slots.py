"""Slots for requests: bounded in all and for each client, and never kept by one that ended."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from rag_service.api.client_slots import ClientSlots
from rag_service.errors import BacklogFull


def slots_for(total: int, per_client: int, wait_seconds: float = 0.01) -> ClientSlots:
    return ClientSlots(
        "uploads", BacklogFull, total=total, per_client=per_client, wait_seconds=wait_seconds
    )


def test_one_client_leaves_slots_to_others() -> None:
    async def work() -> None:
        slots = slots_for(total=4, per_client=3)
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
        slots = slots_for(total=1, per_client=1, wait_seconds=30)
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
        slots = slots_for(total=1, per_client=1)
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


def test_without_a_wait_a_free_slot_is_given_and_a_full_kind_refused_at_once() -> None:
    async def work() -> None:
        slots = slots_for(total=1, per_client=1, wait_seconds=0.0)
        for _ in range(3):
            async with slots.slot("a"):
                with pytest.raises(BacklogFull):
                    async with slots.slot("b"):
                        pass

    asyncio.run(work())


async def _hold(slots: ClientSlots) -> None:
    async with slots.slot("a"):
        await asyncio.sleep(60)
