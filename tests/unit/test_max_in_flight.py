"""ocr.max_in_flight bounds the requests that all processes together have open on one server."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from rag_service.config.loader import get_settings
from rag_service.ocr.concurrency.changes import ChangeReason
from rag_service.ocr.concurrency.limiter import (
    Fixed,
    Limiter,
    ProcessBound,
    Together,
    limiter_for,
)
from rag_service.ocr.concurrency.search import ConcurrencySearch
from rag_service.ocr.concurrency.search_state import Aim
from tests.simulators import virtual_time

FORKS = 8
REPORT_SECONDS, ANSWER_SECONDS = 5.0, 4.0
# Processes at work from second to second: alone, all, few, all again, alone.
SCHEDULE = [(0, 1), (60, 8), (120, 3), (180, 8), (240, 1), (300, 0)]


class Processes:
    """Processes with endless pages that come and go; each reports as the ocr worker does."""

    def __init__(self, governor, bound):
        self.limiters = [
            Limiter(governor(), now=self._now, bound=ProcessBound(bound, FORKS))
            for _ in range(FORKS)
        ]
        self.usual = {}
        self.work = {}
        self.joined_at = float("-inf")

    @staticmethod
    def _now():
        return asyncio.get_running_loop().time()

    @property
    def open(self):
        return sum(limiter.in_flight for limiter in self.limiters)

    @property
    def parts(self):
        return sum(self.limiters[number]._bound.part for number in self.work)

    async def set_count(self, count):
        for number in range(FORKS):
            if number < count and number not in self.work:
                self.joined_at = self._now()
                self.work[number] = asyncio.ensure_future(self._run(number))
            elif number >= count and number in self.work:
                work = self.work.pop(number)
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                self.usual.pop(number, None)

    async def _run(self, number):
        limiter = self.limiters[number]
        at_work = limiter.at_work(self._no_gauges, self._reporter(number))
        async with at_work, asyncio.TaskGroup() as requests:
            for _ in range(64):
                requests.create_task(self._send(limiter))

    @staticmethod
    async def _no_gauges():
        return None

    def _reporter(self, number):
        last = float("-inf")

        async def report(load):
            nonlocal last
            if self._now() - last < REPORT_SECONDS:
                return None
            last = self._now()
            self.usual[number] = load.limit
            return Together(len(self.usual), sum(self.usual.values()))

        return report

    @staticmethod
    async def _send(limiter):
        while True:
            async with limiter.request():
                await asyncio.sleep(ANSWER_SECONDS)


async def simulate(governor, bound):
    """Return (seconds since the last process joined, open requests, parts) for each second."""
    processes, seen = Processes(governor, bound), []
    for (begins, count), (ends, _) in pairwise(SCHEDULE):
        await processes.set_count(count)
        for second in range(begins, ends):
            await asyncio.sleep(1.0)
            seen.append((second + 1 - processes.joined_at, processes.open, processes.parts))
    await processes.set_count(0)
    return seen


GOVERNORS = {
    "auto": lambda: ConcurrencySearch(Aim(timeout=120.0), start=8.0, among=FORKS),
    "fixed": lambda: Fixed(64),
}


@pytest.mark.parametrize("kind", GOVERNORS)
@pytest.mark.parametrize("bound", [8, 20, 32])
def test_the_sum_of_open_requests_stays_within_the_bound_once_loads_are_known(kind, bound):
    seen = virtual_time.run(simulate(GOVERNORS[kind], bound))
    known = [(open_, parts) for since, open_, parts in seen if since > 2 * REPORT_SECONDS]
    assert max(parts for _, parts in known) <= bound
    assert max(open_ for open_, _ in known) <= bound
    # Until then a process that joins has at most its part of the start.
    assert max(open_ for _, open_, _ in seen) <= bound + (FORKS - 1) * (bound // FORKS)


@pytest.mark.parametrize("kind", GOVERNORS)
def test_the_bound_is_used_by_one_process_and_by_eight(kind):
    seen = virtual_time.run(simulate(GOVERNORS[kind], 32))
    # A trial of less may be under way at any one second.
    assert max(open_ for _, open_, _ in seen[40:60]) == 32
    assert max(open_ for _, open_, _ in seen[90:120]) == 32


def test_a_process_can_always_go_on():
    assert ProcessBound(4, processes=8).part == 1


def test_a_process_that_joins_counts_at_once_and_one_that_left_when_missing_twice():
    bound, parts = ProcessBound(24, processes=2), []
    for processes in (2, 3, 2, 2):
        bound.share_with(processes)
        parts.append(bound.part)
    assert parts == [12, 8, 8, 12]


def test_the_search_gives_the_reason_and_stops_at_the_bound():
    search = ConcurrencySearch(Aim(timeout=120.0), start=16.0)
    search.set_bound(4)
    for second in range(300):
        search.answered(2.0, float(second))
        search.tick(4, None, float(second))
        assert search.limit <= 4.0
    changes = search.changes.take()
    assert (changes[ChangeReason.BOUND].old, changes[ChangeReason.BOUND].new) == (16.0, 4.0)


@pytest.mark.parametrize(("pages", "processes", "limit"), [(64, None, 2.0), (64, 1, 16.0)])
def test_the_setting_reaches_the_limiter(monkeypatch, pages, processes, limit):
    monkeypatch.setattr("rag_service.ocr.concurrency.limiter._limiters", {})
    base = get_settings()
    chosen = {"base_url": "http://127.0.0.1:1", "pages_in_flight": pages, "max_in_flight": 16}
    ocr = base.ocr.model_copy(update=chosen)
    settings = base.model_copy(update={"ocr": ocr})
    assert limiter_for(settings, start=None, processes=processes).governor.limit == limit
