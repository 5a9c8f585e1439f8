"""Sends pages to an OCR server with 1, 2, 4, … in flight and measures.

The load never drains between two steps: each step adds requests to those of the one before. An
answer counts if its request was sent after an answer of the same step, so neither the warm-up of
the server nor the beginning of a step is measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rag_service.errors import RagServiceError
from rag_service.ocr.ocr_client import OcrClient, PageAnswer
from rag_service.ocr.probe.findings import Bounds, Ending, Step, next_in_flight
from rag_service.ocr.server_gauges import ServerGauges
from rag_service.runtime.retry import TryAgain

_SAMPLE_SECONDS, _POLL_SECONDS = 0.25, 0.02
# The share of samples with a waiting request from which the slots count as full.
_FULL_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class ProbeQuestion:
    """The request for every page; `draw` makes a new page and is called from threads."""

    draw: Callable[[], bytes]
    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class _Answered:
    """An answer in one place of the load; `before`: when that place's previous answer came."""

    place: int
    began: float
    ended: float
    before: float | None
    page: PageAnswer


@dataclass(frozen=True, slots=True)
class _GaugeSample:
    at: float
    open: int
    gauges: ServerGauges | None


class ProbeLoad:
    """A constant number of requests to one server; leaving the context closes them all."""

    def __init__(self, client: OcrClient, question: ProbeQuestion, bounds: Bounds) -> None:
        self.error: RagServiceError | TryAgain | None = None
        self._client = client
        self._question = question
        self._bounds = bounds
        self._places: list[asyncio.Task[None]] = []
        self._sampling: asyncio.Task[None] | None = None
        self._open: dict[int, float] = {}
        self._answers: list[_Answered] = []
        self._samples: list[_GaugeSample] = []

    async def __aenter__(self) -> ProbeLoad:
        self._sampling = asyncio.create_task(self._sample_gauges())
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [task for task in (self._sampling, *self._places) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def step(self, in_flight: int, stop: asyncio.Event) -> Step:
        """Raise the load to `in_flight` and measure.

        Ends early if it is stopped, at an error or at an answer that is too slow.
        """
        began, cpu = time.monotonic(), time.process_time()
        self._answers.clear()
        self._samples.clear()
        for place in range(len(self._places), in_flight):
            self._places.append(asyncio.create_task(self._keep_asking(place)))
        settled: float | None = None
        while not (stop.is_set() or self.error or self._too_slow()):
            if settled is None and len({a.place for a in self._answers}) == in_flight:
                settled = time.monotonic()
            if settled is not None and self._is_enough(in_flight, began, settled):
                break
            self._raise_unexpected()
            await asyncio.sleep(_POLL_SECONDS)
        busy = (time.process_time() - cpu) / (time.monotonic() - began)
        return self._measured(in_flight, began, settled or began, busy)

    async def _keep_asking(self, place: int) -> None:
        before: float | None = None
        page = await self._draw()
        while self.error is None:
            following = asyncio.create_task(self._draw())
            try:
                began = self._open[place] = time.monotonic()
                answer = await self._client.read(
                    page, prompt=self._question.prompt, max_tokens=self._question.max_tokens
                )
            except (RagServiceError, TryAgain) as error:
                self.error = self.error or error
                return
            finally:
                del self._open[place]
                if self.error is not None:
                    following.cancel()
            ended = time.monotonic()
            self._answers.append(_Answered(place, began, ended, before, answer))
            before = ended
            page = await following

    async def _draw(self) -> bytes:
        return await asyncio.to_thread(self._question.draw)

    async def _sample_gauges(self) -> None:
        while True:
            gauges = await self._client.gauges()
            self._samples.append(_GaugeSample(time.monotonic(), len(self._open), gauges))
            await asyncio.sleep(_SAMPLE_SECONDS)

    def _too_slow(self) -> bool:
        oldest = min(self._open.values(), default=None)
        return oldest is not None and time.monotonic() - oldest > self._bounds.latency

    def _is_enough(self, in_flight: int, began: float, settled: float) -> bool:
        lasted = time.monotonic() - settled >= self._bounds.seconds
        counted = self._counted(began)
        # One of every place, or slow answers would be left out.
        whole = len({answer.place for answer in counted}) == in_flight
        return lasted and whole and len(counted) >= self._bounds.answers

    def _counted(self, began: float) -> list[_Answered]:
        """Return the answers whose request was sent after an answer of this step."""
        return [a for a in self._answers if a.before is not None and a.before >= began]

    def _raise_unexpected(self) -> None:
        """Raise the error of a place that ended by anything but a server's error."""
        for place in self._places:
            if place.done() and not place.cancelled():
                place.result()

    def _measured(self, in_flight: int, began: float, settled: float, busy: float) -> Step:
        counted = self._counted(began)
        step: dict[str, object] = {
            "in_flight": in_flight,
            "answers": len(counted),
            "empty": sum(not answer.page.text.strip() for answer in counted),
            "client_cpu": round(busy, 2),
            "too_slow": self._too_slow(),
            "error": None if self.error is None else str(self.error),
        }
        step |= _gauges_of([sample for sample in self._samples if sample.at >= settled])
        if counted:
            step |= _timed(in_flight, counted)
        return Step.model_validate(step)


async def probe(
    load: ProbeLoad,
    bounds: Bounds,
    slots: int | None,
    stop: asyncio.Event,
    *,
    starting: Callable[[int], None],
    ended: Callable[[Step], None],
) -> Ending:
    """Measure step after step until one says why to stop.

    Calls `starting` with the number in flight before each step and `ended` after it.
    """
    steps: list[Step] = []
    while True:
        following = next_in_flight(steps, bounds, slots)
        if isinstance(following, Ending):
            return following
        starting(following)
        step = await load.step(following, stop)
        if stop.is_set():
            # Part of a step is not a measurement.
            return Ending.INTERRUPTED
        steps.append(step)
        ended(step)


def _timed(in_flight: int, counted: Sequence[_Answered]) -> dict[str, float | None]:
    """Return throughput by Little's law (places divided by their mean cycle) and latencies."""
    cycles = [a.ended - a.before for a in counted if a.before is not None]
    seconds = sorted(a.ended - a.began for a in counted)
    return {
        "pages_per_second": round(in_flight / _mean(cycles), 4),
        "median": round(seconds[len(seconds) // 2], 3),
        "p95": round(seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))], 3),
        "slowest": round(seconds[-1], 3),
        "open": round(in_flight * _mean(seconds) / _mean(cycles), 2),
        "prompt_tokens": _mean_known(a.page.prompt_tokens for a in counted),
        "completion_tokens": _mean_known(a.page.completion_tokens for a in counted),
    }


def _gauges_of(samples: Sequence[_GaugeSample]) -> dict[str, float | int | None]:
    gauges = [sample.gauges for sample in samples if sample.gauges is not None]
    full = [int(each.running) for each in gauges if each.waiting >= 1 and each.running >= 1]
    if len(full) < _FULL_SHARE * len(gauges):
        # A request waits for a moment even if a slot is free.
        full = []
    return {
        "running": _mean_known(each.running for each in gauges),
        "waiting": _mean_known(each.waiting for each in gauges),
        "cache_use": _mean_known(each.cache_use for each in gauges),
        "full_at": max(full, default=None),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(_mean(known), 3) if known else None
