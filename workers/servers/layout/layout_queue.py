"""The request queue of the layout model: pictures of all clients in batches, and its metrics."""

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
# How many batches are kept decoded: the one in the model and the next.
_DECODED_BATCHES = 2


class ModelNotReady(Exception):
    """The model is not loaded, or the server is stopping: try again later."""


class QueueFull(Exception):
    """The limit of waiting requests is reached."""


class LayoutAbandoned(Exception):
    """The client closed its connection before its turn came."""


class ModelFailed(Exception):
    """The model raised an error on this picture."""


@dataclass(frozen=True)
class _Job:
    picture: Any
    done: asyncio.Future[list[LayoutBox]]


class LayoutQueue:
    """One model, the queue before it, and the metrics of both. Belongs to one event loop."""

    def __init__(self, settings: LayoutOptions, load: Callable[[], LayoutModel]) -> None:
        self._settings = settings
        self._load = load
        self._model: LayoutModel | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._readers = ThreadPoolExecutor(thread_count(settings), thread_name_prefix="read")
        self._decoded = asyncio.Semaphore(_DECODED_BATCHES * settings.batch_size)
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
        """Load the model in a thread; an error is kept in `failure`."""
        try:
            self._model = await asyncio.get_running_loop().run_in_executor(self._thread, self._load)
        except Exception as error:
            self.failure = error
        else:
            self._batches = asyncio.create_task(self._work(self._model))

    def drain(self) -> None:
        """Refuse new requests; those already accepted are answered."""
        self._closing = True

    def close(self) -> None:
        """End the threads, when no request waits any more."""
        if self._batches is not None:
            self._batches.cancel()
        self._thread.shutdown()
        self._readers.shutdown()

    async def find(self, jpeg: bytes, hung_up: Callable[[], Awaitable[bool]]) -> list[LayoutBox]:
        """Return the boxes of one picture, found in one batch with others.

        Raises ModelNotReady, QueueFull, LayoutAbandoned (before the model runs), ModelFailed and
        BadPicture.
        """
        model = self._model
        if model is None or self._closing:
            raise ModelNotReady
        if self.waiting >= self._settings.max_waiting:
            raise QueueFull
        self.waiting += 1
        try:
            async with self._decoded:
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
        """Return the next picture and those that arrive within batch_wait."""
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
        """Return a result for each picture; if a batch fails, each picture is tried alone."""
        run = asyncio.get_running_loop().run_in_executor
        try:
            return list(await run(self._thread, model.find, pictures))
        except Exception as error:
            if len(pictures) == 1:
                log.exception("The layout model failed on a picture.")
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
    """The server's metrics for Prometheus."""

    def __init__(self, layout: LayoutQueue) -> None:
        self._registry = CollectorRegistry()
        process = psutil.Process()
        self._gauge("ready", "1 if the model is loaded.", lambda: layout.ready)
        self._gauge("waiting", "Requests that wait or are in the model.", lambda: layout.waiting)
        self._gauge(
            "resident_bytes", "Memory of the layout server.", lambda: process.memory_info().rss
        )
        self._size = Histogram(
            _NAME + "batch_size", "Pictures per batch.", buckets=_SIZES, registry=self._registry
        )
        self._seconds = Histogram(
            _NAME + "batch_seconds",
            "Seconds of the model per batch.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._requests = Counter(
            _NAME + "requests",
            "Requests by outcome.",
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
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        Gauge(_NAME + name, meaning, registry=self._registry).set_function(value)
