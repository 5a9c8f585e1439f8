"""Admission of requests to one OCR server: one limiter for each server in a process.

The governor says how many requests may be open; the limiter admits them in the order of asking,
and samples the server's gauges while there is work.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from rag_service.config.options import OcrOptions, Settings
from rag_service.ocr.concurrency.changes import ChangeLog, ChangeReason
from rag_service.ocr.concurrency.search import ConcurrencySearch
from rag_service.ocr.concurrency.search_state import Aim
from rag_service.ocr.ocr_client import AnswerTimedOut, server_url
from rag_service.ocr.server_gauges import ServerGauges
from rag_service.runtime.clocks import steady_wall_clock
from rag_service.runtime.memory import has_enough_memory

_SAMPLE_SECONDS = 1.0
# What is open is reported as the mean of this time: a short document begins and ends between two
# samples.
_MEAN_SECONDS = 5.0
# Pages that are rendered while others are read, so that a free place is used at once.
_PAGES_AHEAD = 2
# Share of the throughput given up for shorter answers if they are the objective.
_YIELDED_FOR_LATENCY = 0.1

ReadGauges = Callable[[], Awaitable[ServerGauges | None]]
ReportLoad = Callable[["LimiterLoad"], Awaitable["Together | None"]]


@dataclass(frozen=True, slots=True)
class LimiterLoad:
    """What a process has open at a server, its usual limit, and whether that is settled.

    `in_flight` is the mean of the last seconds, earlier documents included. `changes` counts why
    the limit changed; the code that stores the counts takes them.
    """

    in_flight: float
    limit: float
    is_settled: bool
    changes: ChangeLog = field(default_factory=ChangeLog, compare=False)


@dataclass(frozen=True, slots=True)
class Together:
    """Processes at work on a server, and the sum of their usual limits if it is known."""

    processes: int
    limit: float | None


class Governor(Protocol):
    """Says how many requests may be open; every request and sample is passed to it."""

    @property
    def changes(self) -> ChangeLog:
        """Why the limit changed."""
        ...

    @property
    def limit(self) -> float:
        """Requests that may be open now."""
        ...

    @property
    def usual(self) -> float:
        """The limit without a short trial."""
        ...

    @property
    def is_settled(self) -> bool:
        """Whether the limit was found to be right."""
        ...

    def admits(self, in_flight: int, now: float) -> bool:
        """Whether one more request goes out now; asked whenever that may have changed."""
        ...

    def answered(self, seconds: float, now: float) -> None:
        """Note that a request was answered after `seconds`."""
        ...

    def timed_out(self, now: float) -> None:
        """Note that a request was given up because of the time-out."""
        ...

    def tick(self, in_flight: int, gauges: ServerGauges | None, now: float) -> None:
        """Note a sample, about once a second."""
        ...

    def share_with(self, processes: int, together: float | None = None) -> None:
        """Note the processes at work on the server, this one included, and all usual limits."""
        ...

    def set_bound(self, bound: int) -> None:
        """Never let the limit be above `bound` from now on."""
        ...


class Fixed:
    """A fixed number of requests; it learns nothing."""

    is_settled = False

    def __init__(self, limit: int, *, server: str = "") -> None:
        """`server` names the server in the log."""
        self._limit = float(limit)
        self._bound = math.inf
        self.changes = ChangeLog(server)
        self.changes.add(0.0, self._limit, ChangeReason.STARTED)

    @property
    def limit(self) -> float:
        return min(self._limit, self._bound)

    @property
    def usual(self) -> float:
        return self.limit

    def admits(self, in_flight: int, now: float) -> bool:  # noqa: ARG002
        return in_flight < self.limit

    def answered(self, seconds: float, now: float) -> None: ...

    def timed_out(self, now: float) -> None: ...

    def tick(self, in_flight: int, gauges: ServerGauges | None, now: float) -> None: ...

    def share_with(self, processes: int, together: float | None = None) -> None: ...

    def set_bound(self, bound: int) -> None:
        old, self._bound = self.limit, float(bound)
        if self.limit != old:
            self.changes.add(old, self.limit, ChangeReason.BOUND)


class ProcessBound:
    """This process's part of the requests that all processes together may have open.

    The part is the bound divided by the processes at work, rounded down, and at least 1: a process
    that holds a run must be able to go on. A process that joins counts at once. One that has left
    counts until it was missing twice.
    """

    def __init__(self, together: int, processes: int) -> None:
        """`processes` are assumed until the first report."""
        self._together = together
        self._reported: deque[int] = deque([processes] * 2, maxlen=2)

    @property
    def part(self) -> int:
        return max(1, self._together // max(self._reported))

    def share_with(self, processes: int) -> None:
        """Note the processes at work, this one included."""
        self._reported.append(processes)


class Limiter:
    """Lets only as many requests be open as its governor and the bound allow."""

    def __init__(
        self,
        governor: Governor,
        *,
        now: Callable[[], float] = steady_wall_clock,
        sample_every: float = _SAMPLE_SECONDS,
        bound: ProcessBound | None = None,
    ) -> None:
        """`now` is a wall clock that does not jump, about the same for all processes."""
        self.governor = governor
        self._bound = bound
        self._now = now
        self._sample_every = sample_every
        self._requests = _Queue(self._may_send)
        self._meter = _Meter(now)
        self._pages = _Queue(lambda open_: open_ < self.most_pages)
        self._apply_bound()

    @property
    def most_pages(self) -> int:
        """Pages that may be in progress now."""
        return math.ceil(self.governor.limit) + _PAGES_AHEAD

    @property
    def in_flight(self) -> int:
        """Requests that are open."""
        return self._requests.open

    @asynccontextmanager
    async def at_work(self, read_gauges: ReadGauges, report: ReportLoad) -> AsyncIterator[None]:
        """Keep the limit up to date for as long as the context lasts.

        `report` is given the load about once a second, and returns who is at work on the server
        if it knows.
        """
        sampling = asyncio.create_task(self._sample_forever(read_gauges, report))
        try:
            yield
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)

    @asynccontextmanager
    async def page(self) -> AsyncIterator[None]:
        """A page in progress: some more than requests, so that some are rendered ahead."""
        await self._pages.enter()
        try:
            yield
        finally:
            self._pages.leave()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """One request, in the order of asking; the governor learns from its duration."""
        await self._requests.enter()
        self._meter.read(self.in_flight)
        began = self._now()
        try:
            yield
            self.governor.answered(self._now() - began, self._now())
        except AnswerTimedOut:
            self.governor.timed_out(self._now())
            raise
        finally:
            self._requests.leave()
            self._meter.read(self.in_flight)
            self._pages.admit()

    def _may_send(self, open_: int) -> bool:
        if self._bound is not None and open_ >= self._bound.part:
            return False
        return self.governor.admits(open_, self._now())

    async def _sample_forever(self, read_gauges: ReadGauges, report: ReportLoad) -> None:
        while True:
            gauges = await read_gauges()
            self.governor.tick(self.in_flight, gauges, self._now())
            self._requests.admit()
            self._pages.admit()
            mean = self._meter.read(self.in_flight)
            governor = self.governor
            load = LimiterLoad(mean, governor.usual, governor.is_settled, governor.changes)
            if (together := await report(load)) is not None:
                self._share_with(together)
            await asyncio.sleep(self._sample_every)

    def _share_with(self, together: Together) -> None:
        before = self._bound.part if self._bound is not None else 0
        if self._bound is not None:
            self._bound.share_with(together.processes)
            # A larger part must not clip what the governor takes over from others; a smaller one
            # must not cut again what the governor gave back on its own.
            if self._bound.part > before:
                self._apply_bound()
        self.governor.share_with(together.processes, together.limit)
        self._apply_bound()

    def _apply_bound(self) -> None:
        if self._bound is not None:
            self.governor.set_bound(self._bound.part)


class _Meter:
    """The mean of the open requests in the last seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._open = 0
        self._used = 0.0
        # When it was read, and the request-seconds up to then.
        self._readings = deque([(now(), 0.0)])

    def read(self, open_: int) -> float:
        """Return the mean up to now; from now on `open_` requests are open."""
        now, (last, _) = self._now(), self._readings[-1]
        self._used += self._open * (now - last)
        self._open = open_
        self._readings.append((now, self._used))
        since = now - _MEAN_SECONDS
        while len(self._readings) > 2 and self._readings[1][0] <= since:
            self._readings.popleft()
        (first, used), (second, later) = self._readings[0], self._readings[1]
        if first < since:
            used += (later - used) * (since - first) / (second - first)
            first = since
        return (self._used - used) / (now - first) if now > first else float(open_)


class _Queue:
    """Admits in the order of asking, as soon as one more may enter."""

    def __init__(self, may_enter: Callable[[int], bool]) -> None:
        self.open = 0
        self._may_enter = may_enter
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self.admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        self.open -= 1
        self.admit()

    def admit(self) -> None:
        while self._waiting and self._may_enter(self.open):
            turn = self._waiting.popleft()
            if not turn.cancelled():
                self.open += 1
                turn.set_result(None)


_limiters: dict[tuple[object, ...], Limiter] = {}


def limiter_for(
    settings: Settings, *, start: float | None, processes: int | None = None
) -> Limiter:
    """Return the process's one limiter for the server; made with `start` at the first call.

    `start` is each fork's part if all forks are at work; `processes` share ocr.max_in_flight until
    a report says how many do, by default all forks of a worker. The limit does not grow while
    the memory guard finds too little memory.
    """
    ocr, guard = settings.ocr, settings.memory_guard
    key = (
        server_url(ocr), ocr.pages_in_flight, ocr.objective, ocr.server_share, ocr.max_in_flight,
        ocr.read_timeout, guard.enabled, guard.min_available_mib,
    )  # fmt: skip
    if key not in _limiters:
        processes = processes or ocr.worker_concurrency
        governor = _governor(ocr, start, processes, lambda: has_enough_memory(settings))
        _limiters[key] = Limiter(governor, bound=_bound(ocr, processes))
    return _limiters[key]


def _bound(settings: OcrOptions, processes: int) -> ProcessBound | None:
    if settings.max_in_flight is None:
        return None
    return ProcessBound(settings.max_in_flight, processes)


def _governor(
    settings: OcrOptions, start: float | None, processes: int, may_grow: Callable[[], bool]
) -> Governor:
    if settings.pages_in_flight != "auto":
        return Fixed(settings.pages_in_flight, server=server_url(settings))
    aim = Aim(
        yielded=_YIELDED_FOR_LATENCY if settings.objective == "latency" else 0.0,
        share=settings.server_share,
        timeout=settings.read_timeout,
    )
    among = None if start is None else processes
    return ConcurrencySearch(
        aim, start=start, among=among, may_grow=may_grow, server=server_url(settings)
    )
