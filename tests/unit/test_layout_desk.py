"""The desk before the model: batches, bounds, and one picture that spoils no other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from rag_service.config.loader import load_settings
from rag_service.config.options import LayoutOptions
from rag_service.layout.layout_model import BadPicture
from rag_service.layout.page_layout import LayoutBox
from workers.servers.layout.layout_queue import (
    LayoutAbandoned,
    LayoutQueue,
    ModelFailed,
    ModelNotReady,
    QueueFull,
)


class Reader:
    """A model whose boxes are the pictures' own bytes; it waits while `held`."""

    name = "reader"
    most = 64

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.go = threading.Event()
        self.go.set()

    def read(self, jpeg: bytes) -> Any:
        if jpeg == b"bad":
            raise BadPicture("no picture")
        return jpeg

    def find(self, pictures: Sequence[Any]) -> list[list[LayoutBox]]:
        self.go.wait(10)
        self.batches.append(list(pictures))
        if b"poison" in pictures:
            raise ValueError("poison")
        return [[LayoutBox(picture.decode(), 1.0, (0, 0, 1, 1))] for picture in pictures]


async def stays() -> bool:
    return False


async def leaves() -> bool:
    return True


def settings(**changes: float) -> LayoutOptions:
    return load_settings().layout.model_copy(update={"batch_wait": 0.05, **changes})


def with_desk(
    work: Callable[[LayoutQueue, Reader], Awaitable[None]], chosen: LayoutOptions
) -> None:
    async def main() -> None:
        model = Reader()
        desk = LayoutQueue(chosen, lambda: model)
        await desk.open()
        try:
            await work(desk, model)
        finally:
            model.go.set()
            desk.close()

    asyncio.run(main())


def labels(results: Sequence[Any]) -> list[Any]:
    return [r if isinstance(r, Exception) else r[0].label for r in results]


def test_pictures_of_all_clients_share_batches_and_each_gets_its_own_answer() -> None:
    async def work(desk: LayoutQueue, model: Reader) -> None:
        names = [f"page-{i}" for i in range(10)]
        found = await asyncio.gather(*(desk.find(name.encode(), stays) for name in names))
        assert labels(found) == names
        assert len(model.batches) < 10
        assert max(len(batch) for batch in model.batches) == 4

    with_desk(work, settings(batch_size=4))


def test_a_picture_on_which_the_model_fails_spoils_no_other() -> None:
    async def work(desk: LayoutQueue, model: Reader) -> None:
        pictures = [b"a", b"poison", b"bad", b"b"]
        found = await asyncio.gather(
            *(desk.find(picture, stays) for picture in pictures), return_exceptions=True
        )
        assert labels(found)[::3] == ["a", "b"]
        assert isinstance(found[1], ModelFailed)
        assert "ValueError: poison" in str(found[1])
        assert isinstance(found[2], BadPicture)
        assert labels([await desk.find(b"c", stays)]) == ["c"]

    with_desk(work, settings())


def test_more_than_may_wait_are_turned_away_and_those_that_wait_are_answered() -> None:
    async def work(desk: LayoutQueue, model: Reader) -> None:
        model.go.clear()
        waiting = [asyncio.create_task(desk.find(b"%d" % i, stays)) for i in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await desk.find(b"one more", stays)
        model.go.set()
        assert labels(await asyncio.gather(*waiting)) == ["0", "1", "2"]
        assert labels([await desk.find(b"later", stays)]) == ["later"]

    with_desk(work, settings(max_waiting=3))


def test_a_client_that_hung_up_while_it_waited_costs_the_model_nothing() -> None:
    async def work(desk: LayoutQueue, model: Reader) -> None:
        with pytest.raises(LayoutAbandoned):
            await desk.find(b"nobody waits", leaves)
        assert labels([await desk.find(b"here", stays)]) == ["here"]
        assert model.batches == [[b"here"]]

    with_desk(work, settings())


def test_a_client_that_is_cancelled_in_a_batch_leaves_the_others_their_answers() -> None:
    async def work(desk: LayoutQueue, model: Reader) -> None:
        model.go.clear()
        first, second = (asyncio.create_task(desk.find(name, stays)) for name in (b"1", b"2"))
        await asyncio.sleep(0.1)
        first.cancel()
        model.go.set()
        assert labels([await second]) == ["2"]
        assert labels([await desk.find(b"3", stays)]) == ["3"]

    with_desk(work, settings())


def test_a_desk_that_drains_answers_what_is_in_hand_and_nothing_new() -> None:
    async def work(desk: LayoutQueue, model: Reader) -> None:
        model.go.clear()
        in_hand = asyncio.create_task(desk.find(b"in hand", stays))
        await asyncio.sleep(0.1)
        desk.drain()
        with pytest.raises(ModelNotReady):
            await desk.find(b"new", stays)
        model.go.set()
        assert labels([await in_hand]) == ["in hand"]

    with_desk(work, settings())


def test_before_the_model_is_loaded_and_where_it_cannot_load_there_is_no_answer() -> None:
    def fail() -> Any:
        raise OSError("no such file")

    async def main() -> None:
        desk = LayoutQueue(settings(), fail)
        with pytest.raises(ModelNotReady):
            await desk.find(b"early", stays)
        await desk.open()
        assert isinstance(desk.failure, OSError)
        assert not desk.ready
        desk.close()

    asyncio.run(main())
