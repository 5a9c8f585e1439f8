"""The layout server's request queue: batches, limits, and errors of single pictures."""

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

# Longer than any test: a batch begins when it is full, and never by time.
UNTIL_FULL = 600.0


class FakeModel:
    """A model whose boxes are labelled with the pictures' bytes; it waits while `go` is cleared."""

    name = "fake"
    most = 64

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.entered = threading.Event()
        self.go = threading.Event()
        self.go.set()

    def read(self, jpeg: bytes) -> Any:
        if jpeg == b"bad":
            raise BadPicture("no picture")
        return jpeg

    def find(self, pictures: Sequence[Any]) -> list[list[LayoutBox]]:
        self.entered.set()
        assert self.go.wait(60)
        self.batches.append(list(pictures))
        if b"poison" in pictures:
            raise ValueError("poison")
        return [[LayoutBox(picture.decode(), 1.0, (0, 0, 1, 1))] for picture in pictures]

    async def until_entered(self) -> None:
        """Wait until a batch is in the model."""
        while not self.entered.is_set():
            await asyncio.sleep(0.01)


async def stays() -> bool:
    return False


async def leaves() -> bool:
    return True


def settings(**changes: float) -> LayoutOptions:
    return load_settings().layout.model_copy(update={"batch_wait": 0.05, **changes})


def with_queue(
    work: Callable[[LayoutQueue, FakeModel], Awaitable[None]], chosen: LayoutOptions
) -> None:
    async def main() -> None:
        model = FakeModel()
        queue = LayoutQueue(chosen, lambda: model)
        await queue.open()
        try:
            await work(queue, model)
        finally:
            model.go.set()
            queue.close()

    asyncio.run(main())


def labels(results: Sequence[Any]) -> list[Any]:
    return [r if isinstance(r, Exception) else r[0].label for r in results]


def test_pictures_of_all_clients_share_batches_and_each_gets_its_own_answer() -> None:
    async def work(queue: LayoutQueue, model: FakeModel) -> None:
        names = [f"page-{i}" for i in range(8)]
        found = await asyncio.gather(*(queue.find(name.encode(), stays) for name in names))
        assert labels(found) == names
        assert [len(batch) for batch in model.batches] == [4, 4]

    with_queue(work, settings(batch_size=4, batch_wait=UNTIL_FULL))


def test_a_batch_that_does_not_fill_begins_after_its_wait() -> None:
    async def work(queue: LayoutQueue, model: FakeModel) -> None:
        assert labels([await queue.find(b"alone", stays)]) == ["alone"]
        assert model.batches == [[b"alone"]]

    with_queue(work, settings(batch_size=4))


def test_a_picture_on_which_the_model_fails_does_not_affect_others() -> None:
    async def work(queue: LayoutQueue, model: FakeModel) -> None:
        pictures = [b"a", b"poison", b"bad", b"b"]
        found = await asyncio.gather(
            *(queue.find(picture, stays) for picture in pictures), return_exceptions=True
        )
        assert labels(found)[::3] == ["a", "b"]
        assert isinstance(found[1], ModelFailed)
        assert "ValueError: poison" in str(found[1])
        assert isinstance(found[2], BadPicture)
        assert labels([await queue.find(b"c", stays)]) == ["c"]

    with_queue(work, settings())


def test_requests_over_the_limit_are_refused_and_waiting_ones_are_answered() -> None:
    async def work(queue: LayoutQueue, model: FakeModel) -> None:
        model.go.clear()
        waiting = [asyncio.create_task(queue.find(b"%d" % i, stays)) for i in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await queue.find(b"too many", stays)
        model.go.set()
        assert labels(await asyncio.gather(*waiting)) == ["0", "1", "2"]
        assert labels([await queue.find(b"later", stays)]) == ["later"]

    with_queue(work, settings(max_waiting=3))


def test_a_picture_of_a_client_that_has_gone_does_not_reach_the_model() -> None:
    async def work(queue: LayoutQueue, model: FakeModel) -> None:
        with pytest.raises(LayoutAbandoned):
            await queue.find(b"abandoned", leaves)
        assert labels([await queue.find(b"present", stays)]) == ["present"]
        assert model.batches == [[b"present"]]

    with_queue(work, settings())


def test_a_client_cancelled_in_a_batch_leaves_the_others_their_answers() -> None:
    async def work(queue: LayoutQueue, model: FakeModel) -> None:
        model.go.clear()
        first, second = (asyncio.create_task(queue.find(name, stays)) for name in (b"1", b"2"))
        await model.until_entered()
        first.cancel()
        model.go.set()
        assert labels([await second]) == ["2"]
        assert sorted(model.batches[0]) == [b"1", b"2"]
        third, fourth = (queue.find(name, stays) for name in (b"3", b"4"))
        assert labels(await asyncio.gather(third, fourth)) == ["3", "4"]

    with_queue(work, settings(batch_size=2, batch_wait=UNTIL_FULL))


def test_a_draining_queue_answers_pictures_in_progress_and_no_new_ones() -> None:
    async def work(queue: LayoutQueue, model: FakeModel) -> None:
        model.go.clear()
        in_progress = asyncio.create_task(queue.find(b"in progress", stays))
        await model.until_entered()
        queue.drain()
        with pytest.raises(ModelNotReady):
            await queue.find(b"new", stays)
        model.go.set()
        assert labels([await in_progress]) == ["in progress"]

    with_queue(work, settings())


def test_there_is_no_answer_before_the_model_is_loaded_or_if_it_cannot_load() -> None:
    def fail() -> Any:
        raise OSError("no such file")

    async def main() -> None:
        queue = LayoutQueue(settings(), fail)
        with pytest.raises(ModelNotReady):
            await queue.find(b"early", stays)
        await queue.open()
        assert isinstance(queue.failure, OSError)
        assert not queue.ready
        queue.close()

    asyncio.run(main())
