"""Places for requests to one OCR server: one limiter a server a process, used by all its pages.

The governor says how many; this lets requests through in the order they came, and looks at the
server's gauges while there is work. Used by parsers.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from rag_service.config.options import OcrOptions, Settings
from rag_service.ocr.concurrency.changes import ChangeLog
from rag_service.ocr.concurrency.search import Aim, ConcurrencySearch
from rag_service.ocr.ocr_client import AnswerTimedOut, server_url
from rag_service.ocr.server_gauges import ServerGauges
from rag_service.runtime.memory import has_enough_memory

_BEAT_SECONDS = 1.0
# What is open is told as the mean of so long: short documents begin and end between two looks.
_MEAN_SECONDS = 5.0
# Pages that are drawn while others are read, so that a place that comes free is used at once.
_AHEAD = 2
# What is given up for shorter answers where they are the objective.
_YIELDED_FOR_LATENCY = 0.1

Look = Callable[[], Awaitable[ServerGauges | None]]
Tell = Callable[["LimiterLoad"], Awaitable["Together | None"]]


@dataclass(frozen=True, slots=True)
class LimiterLoad:
    """What a process has open at a server, would usually let be open, and if that is settled.

    `in_flight` is the mean of the last seconds, documents before this one included. `changes`
    counts why the limit changed; whoever stores the counts takes them.
    """

    in_flight: float
    limit: float
    is_settled: bool
    changes: ChangeLog = field(default_factory=ChangeLog, compare=False)


@dataclass(frozen=True, slots=True)
class Together:
    """Processes at work on a server, and their usual limits together, where these are known."""

    processes: int
    limit: float | None


class Governor(Protocol):
    """Says how many requests may be open; told what becomes of each."""

    @property
    def changes(self) -> ChangeLog:
        """Why the limit changed."""
        ...

    @property
    def limit(self) -> float:
        """So many."""
        ...

    @property
    def usual(self) -> float:
        """So many, but for a short trial."""
        ...

    @property
    def is_settled(self) -> bool:
        """Whether that was found to be right."""
        ...

    def admits(self, in_flight: int, now: float) -> bool:
        """Whether one more goes out now; asked whenever that may have changed."""
        ...

    def answered(self, seconds: float, now: float) -> None:
        """One was answered after so long."""
        ...

    def timed_out(self, now: float) -> None:
        """One was given up for its time."""
        ...

    def tick(self, in_flight: int, gauges: ServerGauges | None, now: float) -> None:
        """About once a second."""
        ...

    def share_with(self, processes: int, together: float | None = None) -> None:
        """So many are at work on the server, this one included; all their usual limits."""
        ...


class Fixed:
    """So many and no other number; nothing is learned."""

    is_settled = False

    def __init__(self, limit: int) -> None:
        self.limit = self.usual = float(limit)
        self.changes = ChangeLog()

    def admits(self, in_flight: int, now: float) -> bool:  # noqa: ARG002
        return in_flight < self.limit

    def answered(self, seconds: float, now: float) -> None: ...

    def timed_out(self, now: float) -> None: ...

    def tick(self, in_flight: int, gauges: ServerGauges | None, now: float) -> None: ...

    def share_with(self, processes: int, together: float | None = None) -> None: ...


class Limiter:
    """Lets at most so many requests be open as its governor finds right."""

    def __init__(
        self,
        governor: Governor,
        *,
        now: Callable[[], float] = time.time,
        beat: float = _BEAT_SECONDS,
    ) -> None:
        """`now` is a wall clock, the same for all processes."""
        self.governor = governor
        self._now = now
        self._beat = beat
        self._requests = _Line(lambda open_: governor.admits(open_, now()))
        self._meter = _Meter(now)
        self._pages = _Line(lambda open_: open_ < self.most_pages)

    @property
    def most_pages(self) -> int:
        """Pages that may be at work now."""
        return math.ceil(self.governor.limit) + _AHEAD

    @property
    def in_flight(self) -> int:
        """Requests that are open."""
        return self._requests.open

    @asynccontextmanager
    async def at_work(self, look: Look, tell: Tell) -> AsyncIterator[None]:
        """Look after the limit for as long as the context lasts.

        `look` reads the server's gauges; `tell` is told about once a second what is open, and
        answers who is at work on the server, where it knows.
        """
        beating = asyncio.create_task(self._beats(look, tell))
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    @asynccontextmanager
    async def page(self) -> AsyncIterator[None]:
        """A page at work: some more than requests may be open, so that some are drawn ahead."""
        await self._pages.enter()
        try:
            yield
        finally:
            self._pages.leave()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """One request, in the order of asking; how long it takes is learned from."""
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

    async def _beats(self, look: Look, tell: Tell) -> None:
        while True:
            gauges = await look()
            self.governor.tick(self.in_flight, gauges, self._now())
            self._requests.admit()
            self._pages.admit()
            mean = self._meter.read(self.in_flight)
            governor = self.governor
            load = LimiterLoad(mean, governor.usual, governor.is_settled, governor.changes)
            if (together := await tell(load)) is not None:
                self.governor.share_with(together.processes, together.limit)
            await asyncio.sleep(self._beat)


class _Meter:
    """The mean of what was open in the last seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._open = 0
        self._used = 0.0
        # When it was read, and the request-seconds up to then.
        self._readings = deque([(now(), 0.0)])

    def read(self, open_: int) -> float:
        """The mean up to now; from now on so many are open."""
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


class _Line:
    """Who waits goes in first come, first served, as soon as one more may."""

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


def limiter_for(settings: Settings, *, start: float | None) -> Limiter:
    """The process's one limiter for the server; made at first, with `start` as a first guess.

    That is each fork's part where all forks work. It does not grow while the memory guard finds
    too little memory.
    """
    ocr, guard = settings.ocr, settings.memory_guard
    key = (
        server_url(ocr), ocr.pages_in_flight, ocr.objective, ocr.server_share, ocr.read_timeout,
        guard.enabled, guard.min_available_mib,
    )  # fmt: skip
    if key not in _limiters:
        _limiters[key] = Limiter(_governor(ocr, start, lambda: has_enough_memory(settings)))
    return _limiters[key]


def _governor(settings: OcrOptions, start: float | None, may_grow: Callable[[], bool]) -> Governor:
    if settings.pages_in_flight != "auto":
        return Fixed(settings.pages_in_flight)
    aim = Aim(
        yielded=_YIELDED_FOR_LATENCY if settings.objective == "latency" else 0.0,
        share=settings.server_share,
        timeout=settings.read_timeout,
    )
    among = None if start is None else settings.worker_concurrency
    return ConcurrencySearch(aim, start=start, among=among, may_grow=may_grow)
