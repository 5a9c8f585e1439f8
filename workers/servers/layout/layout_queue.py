"""The desk where pictures of all clients wait for the one model, and its figures. Used by api."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rag_service.config.options import LayoutOptions
from rag_service.layout.layout_model import LayoutModel, thread_count
from rag_service.layout.page_layout import LayoutBox

log = logging.getLogger(__name__)

_NAME = "rag_service_layout_"
_SIZES = (1, 2, 4, 8, 16, 32, 64)
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# Batches whose pictures are decoded: the one in the model and the next.
_DECODED = 2


class ModelNotReady(Exception):
    """The model is not loaded, or the server is stopping: try again later."""


class QueueFull(Exception):
    """As many requests wait as may."""


class LayoutAbandoned(Exception):
    """The client hung up before its turn came."""


class ModelFailed(Exception):
    """The model raised an error on this picture alone."""


@dataclass(frozen=True)
class _Job:
    picture: Any
    done: asyncio.Future[list[LayoutBox]]


class LayoutQueue:
    """One model, the batches before it, and the counts of both. Lives on one event loop."""

    def __init__(self, settings: LayoutOptions, load: Callable[[], LayoutModel]) -> None:
        self._settings = settings
        self._load = load
        self._model: LayoutModel | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._readers = ThreadPoolExecutor(thread_count(settings), thread_name_prefix="read")
        self._room = asyncio.Semaphore(_DECODED * settings.batch_size)
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._batches: asyncio.Task[None] | None = None
        self._closing = False
        self.failure: Exception | None = None
        self.waiting = 0
        self.metrics = LayoutQueueMetrics(self)

    @property
    def ready(self) -> bool:
        return self._model is not None and not self._closing

    async def open(self) -> None:
        """Load the model off the event loop; a failure is kept for whoever runs the server."""
        try:
            self._model = await asyncio.get_running_loop().run_in_executor(self._thread, self._load)
        except Exception as error:
            self.failure = error
        else:
            self._batches = asyncio.create_task(self._work(self._model))

    def drain(self) -> None:
        """Turn away what comes; what is in hand is answered."""
        self._closing = True

    def close(self) -> None:
        """Nobody waits any more: end the threads."""
        if self._batches is not None:
            self._batches.cancel()
        self._thread.shutdown()
        self._readers.shutdown()

    async def find(self, jpeg: bytes, hung_up: Callable[[], Awaitable[bool]]) -> list[LayoutBox]:
        """The boxes of one picture, found together with those of others.

        Raises NotReady, Busy, Gone (at no cost to the model), Failed, and BadPicture.
        """
        model = self._model
        if model is None or self._closing:
            raise ModelNotReady
        if self.waiting >= self._settings.max_waiting:
            raise QueueFull
        self.waiting += 1
        try:
            async with self._room:
                if await hung_up():
                    raise LayoutAbandoned
                loop = asyncio.get_running_loop()
                picture = await loop.run_in_executor(self._readers, model.read, jpeg)
                job = _Job(picture, loop.create_future())
                self._jobs.put_nowait(job)
                return await job.done
        finally:
            self.waiting -= 1

    async def _work(self, model: LayoutModel) -> None:
        most = min(self._settings.batch_size, model.most)
        while True:
            jobs = await self._batch(most)
            started = time.perf_counter()
            results = await self._find(model, [job.picture for job in jobs])
            self.metrics.batch(len(jobs), time.perf_counter() - started)
            for job, result in zip(jobs, results, strict=True):
                _settle(job, result)

    async def _batch(self, most: int) -> list[_Job]:
        """The first picture that comes, and what joins it within batch_wait."""
        jobs = [await self._jobs.get()]
        deadline = time.monotonic() + self._settings.batch_wait
        while len(jobs) < most:
            try:
                left = max(deadline - time.monotonic(), 0)
                jobs.append(await asyncio.wait_for(self._jobs.get(), left))
            except TimeoutError:
                break
        return jobs

    async def _find(
        self, model: LayoutModel, pictures: Sequence[Any]
    ) -> list[list[LayoutBox] | Exception]:
        """A result a picture; where the batch fails each is tried alone, so one spoils no other."""
        run = asyncio.get_running_loop().run_in_executor
        try:
            return list(await run(self._thread, model.find, pictures))
        except Exception as error:
            if len(pictures) == 1:
                log.exception("The layout model failed on a picture")
                return [error]
        alone = [await self._find(model, [picture]) for picture in pictures]
        return [results[0] for results in alone]


def _settle(job: _Job, result: list[LayoutBox] | Exception) -> None:
    if job.done.done():
        return
    if isinstance(result, Exception):
        job.done.set_exception(ModelFailed(f"{type(result).__name__}: {result}"))
    else:
        job.done.set_result(result)


class LayoutQueueMetrics:
    """What the server did, for Prometheus."""

    def __init__(self, desk: LayoutQueue) -> None:
        self._registry = CollectorRegistry()
        process = psutil.Process()
        self._gauge("ready", "1 once the model is loaded.", lambda: desk.ready)
        self._gauge("waiting", "Requests that wait or are in the model.", lambda: desk.waiting)
        self._gauge(
            "resident_bytes", "Memory of the layout server.", lambda: process.memory_info().rss
        )
        self._size = Histogram(
            _NAME + "batch_size", "Pictures a batch.", buckets=_SIZES, registry=self._registry
        )
        self._seconds = Histogram(
            _NAME + "batch_seconds",
            "Seconds of the model a batch.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._requests = Counter(
            _NAME + "requests",
            "Requests by the way they ended.",
            ["outcome"],
            registry=self._registry,
        )

    def batch(self, size: int, seconds: float) -> None:
        """Count one batch."""
        self._size.observe(size)
        self._seconds.observe(seconds)

    def ended(self, outcome: str) -> None:
        """Count one request."""
        self._requests.labels(outcome).inc()

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        Gauge(_NAME + name, meaning, registry=self._registry).set_function(value)
