"""The request queue of the OCR engine, and its metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from workers.servers.cpu_ocr.ocr_engine import TextRecogniser

log = logging.getLogger(__name__)
T = TypeVar("T")

# The engine runs one inference at a time, so one page is read at a time: `running` then means
# "computing" and not "waiting inside the engine".
SLOTS = 1


class EngineNotReady(Exception):
    """The engine is not loaded, or the server is stopping: try again later."""


class ReadingAbandoned(Exception):
    """The client closed its connection before its answer was ready."""


class OcrQueue:
    """One engine, the queue before it, and the metrics of both. Belongs to one event loop."""

    def __init__(self, model: str, load: Callable[[], TextRecogniser]) -> None:
        self._load = load
        self._engine: TextRecogniser | None = None
        self._threads = ThreadPoolExecutor(SLOTS, thread_name_prefix="cpu-ocr")
        self._free = asyncio.Semaphore(SLOTS)
        self._closing = asyncio.Event()
        self.failure: Exception | None = None
        self.running = 0
        self.waiting = 0
        self.metrics = OcrQueueMetrics(self, model)

    @property
    def ready(self) -> bool:
        return self._engine is not None and not self._closing.is_set()

    async def open(self) -> None:
        """Load the engine in a thread; an error is kept in `failure`."""
        try:
            self._engine = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._load
            )
        except Exception as error:
            log.exception("The OCR engine could not be loaded.")
            self.failure = error

    def drain(self) -> None:
        """Refuse waiting and new requests; the page in progress is finished."""
        self._closing.set()

    def close(self) -> None:
        self._threads.shutdown()

    async def run(self, work: Callable[[TextRecogniser], T], disconnected: Awaitable[object]) -> T:
        """Call work(engine) in a thread when its turn comes.

        Raises EngineNotReady before the engine is loaded and while the queue drains, and
        ReadingAbandoned if `disconnected` ends first: a waiting request then leaves the queue
        without being read.
        """
        watch = asyncio.ensure_future(disconnected)
        try:
            await self._wait_for_turn(watch)
            try:
                return await self._work(work, watch)
            finally:
                self._free.release()
        finally:
            watch.cancel()

    async def _wait_for_turn(self, watch: asyncio.Future[object]) -> None:
        turn = asyncio.ensure_future(self._free.acquire())
        closing = asyncio.ensure_future(self._closing.wait())
        self.waiting += 1
        try:
            await asyncio.wait((turn, watch, closing), return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                raise ReadingAbandoned
            if not self.ready:
                raise EngineNotReady
        except BaseException:
            # A turn acquired in the same moment is passed to the next in the queue.
            if not turn.cancel() and not turn.cancelled():
                self._free.release()
            raise
        finally:
            self.waiting -= 1
            closing.cancel()

    async def _work(self, work: Callable[[TextRecogniser], T], watch: asyncio.Future[object]) -> T:
        assert self._engine is not None  # noqa: S101 - `ready` was checked with the turn
        self.running += 1
        try:
            result = await asyncio.get_running_loop().run_in_executor(
                self._threads, work, self._engine
            )
        finally:
            self.running -= 1
        if watch.done():
            raise ReadingAbandoned
        return result


class OcrQueueMetrics:
    """Prometheus metrics under vLLM's names, so that one reader of gauges works with both."""

    def __init__(self, queue: OcrQueue, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        running = self._gauge("vllm:num_requests_running", "Requests being read.")
        running.set_function(lambda: queue.running)
        waiting = self._gauge("vllm:num_requests_waiting", "Requests in the queue.")
        waiting.set_function(lambda: queue.waiting)
        self._finished = Counter(
            "vllm:request_success",
            "Requests by outcome: stop, length, abort (client disconnected) or error.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._pages = Counter(
            "cpu_ocr_pages",
            "Pages read, by the degrees by which they were turned.",
            ["model_name", "turned"],
            registry=self._registry,
        )

    def _gauge(self, name: str, help_text: str) -> Gauge:
        gauge = Gauge(name, help_text, ["model_name"], registry=self._registry)
        return gauge.labels(self._model)

    def finished(self, reason: str) -> None:
        """Count a request that ended."""
        self._finished.labels(self._model, reason).inc()

    def page(self, turned: int) -> None:
        """Count a page that was read."""
        self._pages.labels(self._model, str(turned)).inc()

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
