"""Sends pages to an OCR server at 1, 2, 4, … in flight and measures. Used by the command `probe`.

The load never drains between two steps: each adds requests to those of the one before. Answers
count once every request has been sent at the step's own load, so that neither a first request
that warms the server up nor the step's beginning is measured.
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

_LOOK_SECONDS, _POLL_SECONDS = 0.25, 0.02
_FULL_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class ProbeQuestion:
    """What is asked of every page; `draw` makes a new one, called from threads."""

    draw: Callable[[], bytes]
    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class _Answered:
    """An answer of one place; `before`: when the place's last answer came."""

    place: int
    began: float
    ended: float
    before: float | None
    page: PageAnswer


@dataclass(frozen=True, slots=True)
class _Look:
    at: float
    open: int
    gauges: ServerGauges | None


class ProbeLoad:
    """Requests to one server that stay so many, as a context; leaving it closes them all."""

    def __init__(self, client: OcrClient, question: ProbeQuestion, bounds: Bounds) -> None:
        self.error: RagServiceError | TryAgain | None = None
        self._client = client
        self._question = question
        self._bounds = bounds
        self._places: list[asyncio.Task[None]] = []
        self._looking: asyncio.Task[None] | None = None
        self._open: dict[int, float] = {}
        self._answers: list[_Answered] = []
        self._looks: list[_Look] = []

    async def __aenter__(self) -> ProbeLoad:
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [task for task in (self._looking, *self._places) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def step(self, in_flight: int, stop: asyncio.Event) -> Step:
        """Grow to so many and measure; ends early when stopped, at an error, at a slow answer."""
        began, cpu = time.monotonic(), time.process_time()
        self._answers.clear()
        self._looks.clear()
        for place in range(len(self._places), in_flight):
            self._places.append(asyncio.create_task(self._keep_asking(place)))
        settled: float | None = None
        while not (stop.is_set() or self.error or self._too_slow()):
            if settled is None and len({a.place for a in self._answers}) == in_flight:
                settled = time.monotonic()
            if settled is not None and self._suffices(in_flight, began, settled):
                break
            self._raise_faults()
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

    async def _look(self) -> None:
        while True:
            gauges = await self._client.gauges()
            self._looks.append(_Look(time.monotonic(), len(self._open), gauges))
            await asyncio.sleep(_LOOK_SECONDS)

    def _too_slow(self) -> bool:
        oldest = min(self._open.values(), default=None)
        return oldest is not None and time.monotonic() - oldest > self._bounds.latency

    def _suffices(self, in_flight: int, began: float, settled: float) -> bool:
        lasted = time.monotonic() - settled >= self._bounds.seconds
        counted = self._counted(began)
        # Of every place, or the slow answers would be those left out.
        whole = len({answer.place for answer in counted}) == in_flight
        return lasted and whole and len(counted) >= self._bounds.answers

    def _counted(self, began: float) -> list[_Answered]:
        """Those asked after an answer of this step, and so at its full load."""
        return [a for a in self._answers if a.before is not None and a.before >= began]

    def _raise_faults(self) -> None:
        """A place that ended by anything but a server's error is our own fault, and is told."""
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
        step |= _seen([look for look in self._looks if look.at >= settled])
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
    """Step after step until there is no more to learn; each is told when it starts and ends."""
    steps: list[Step] = []
    while True:
        following = next_in_flight(steps, bounds, slots)
        if isinstance(following, Ending):
            return following
        starting(following)
        step = await load.step(following, stop)
        if stop.is_set():
            # What a part of a step showed is no measurement.
            return Ending.INTERRUPTED
        steps.append(step)
        ended(step)


def _timed(in_flight: int, counted: Sequence[_Answered]) -> dict[str, float | None]:
    """Throughput by Little's law: a place's mean time from answer to answer, so many places."""
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


def _seen(looks: Sequence[_Look]) -> dict[str, float | int | None]:
    gauges = [look.gauges for look in looks if look.gauges is not None]
    full = [int(seen.running) for seen in gauges if seen.waiting >= 1 and seen.running >= 1]
    if len(full) < _FULL_SHARE * len(gauges):
        # A request waits for a moment also where there is a free slot.
        full = []
    return {
        "running": _mean_known(seen.running for seen in gauges),
        "waiting": _mean_known(seen.waiting for seen in gauges),
        "cache_use": _mean_known(seen.cache_use for seen in gauges),
        "full_at": max(full, default=None),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(_mean(known), 3) if known else None
