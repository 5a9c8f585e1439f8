"""The limiter keeps the order of requests; its search finds what servers of each kind can take."""

import asyncio
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_service.config.loader import get_settings
from rag_service.ocr.concurrency.limiter import Fixed, Limiter, limiter_for
from rag_service.ocr.concurrency.search import ConcurrencySearch
from rag_service.ocr.concurrency.search_state import Aim
from rag_service.ocr.concurrency.tuning import TUNING
from rag_service.ocr.ocr_client import AnswerTimedOut
from rag_service.ocr.server_gauges import ServerGauges, parse_gauges
from tests.simulators.simulated_batch import H200, LOCKSTEP, REPORT, SERIAL, Batch

TIMEOUT = 120.0


async def _let_tasks_run():
    for _ in range(5):
        await asyncio.sleep(0)


def test_requests_go_in_their_order_and_within_the_limit():
    async def go():
        limiter, order, gate = Limiter(Fixed(2)), [], asyncio.Event()

        async def one(number):
            async with limiter.request():
                order.append(number)
                await gate.wait()

        work = [asyncio.ensure_future(one(number)) for number in range(5)]
        await _let_tasks_run()
        assert (order, limiter.in_flight) == ([0, 1], 2)
        gate.set()
        await asyncio.gather(*work)
        assert (order, limiter.in_flight) == ([0, 1, 2, 3, 4], 0)

    asyncio.run(go())


@pytest.mark.parametrize("which", [0, 1])
def test_a_cancelled_request_leaves_its_place_to_the_next(which):
    async def go():
        limiter, gate, entered = Limiter(Fixed(1)), asyncio.Event(), []

        async def one(number):
            async with limiter.request():
                entered.append(number)
                await gate.wait()

        work = [asyncio.ensure_future(one(number)) for number in range(3)]
        await _let_tasks_run()
        work[which].cancel()
        await _let_tasks_run()
        gate.set()
        await asyncio.gather(*work, return_exceptions=True)
        assert 2 in entered
        assert limiter.in_flight == 0

    asyncio.run(go())


def test_pages_are_rendered_a_little_ahead_of_the_requests():
    async def go():
        limiter, gate, inside = Limiter(Fixed(3)), asyncio.Event(), []

        async def page(number):
            async with limiter.page():
                inside.append(number)
                await gate.wait()

        work = [asyncio.ensure_future(page(number)) for number in range(9)]
        await _let_tasks_run()
        assert len(inside) == limiter.most_pages == 5
        gate.set()
        await asyncio.gather(*work)
        assert inside == list(range(9))

    asyncio.run(go())


def test_a_time_out_halves_the_limit():
    async def go():
        search = ConcurrencySearch(Aim(timeout=TIMEOUT), start=8.0)
        with pytest.raises(AnswerTimedOut):
            async with Limiter(search).request():
                raise AnswerTimedOut("late")
        return search.limit

    assert asyncio.run(go()) == 4.0


class Fleet:
    """Searches without messages between them in front of one simulated server."""

    def __init__(self, rates, *, gauged, processes=8, began=0.0, timeout=TIMEOUT):
        self.batch = Batch(rates, seed=1, now=began)
        self.gauged = gauged
        self.searches = [
            ConcurrencySearch(Aim(timeout=timeout), chance=random.Random(n))
            for n in range(processes)
        ]
        self.open = [{} for _ in self.searches]
        self.late = self.keys = self.idle = 0
        self.longest = 0.0

    def run(self, seconds):
        """Let time pass; return the pages that were answered in it."""
        before, until = self.batch.finished, self.batch.now + seconds
        next_sample = self.batch.now
        while self.batch.now < until:
            self._send()
            for key in self.batch.advance(min(self.batch.next_event(), next_sample)):
                self._answered(key)
            if self.batch.now >= next_sample:
                next_sample += 1.0
                self._sample()
        return self.batch.finished - before

    def _send(self):
        now = self.batch.now
        for search, requests in list(zip(self.searches, self.open, strict=True))[self.idle :]:
            while search.admits(len(requests), now):
                self.keys += 1
                requests[self.keys] = now
                self.batch.arrive(self.keys)

    def _answered(self, key):
        now = self.batch.now
        for search, requests in zip(self.searches, self.open, strict=True):
            if key in requests:
                seconds = now - requests.pop(key)
                self.longest = max(self.longest, seconds)
                search.answered(seconds, now)

    def retire(self, processes):
        """Let the first processes have nothing more to send."""
        self.idle = processes

    def share(self):
        """Report all processes at work to each of them, as is done through PostgreSQL."""
        at_work = self.searches[self.idle :]
        for search in at_work:
            search.share_with(len(at_work), sum(other.usual for other in at_work))

    def _sample(self):
        batch = self.batch
        gauges = (
            ServerGauges(batch.running, batch.waiting, batch.answer_tokens) if self.gauged else None
        )
        for search, requests in zip(self.searches, self.open, strict=True):
            search.tick(len(requests), gauges, batch.now)

    @property
    def in_flight(self):
        return sum(map(len, self.open))


@pytest.mark.parametrize("processes", [1, 3, 8, 16])
@pytest.mark.parametrize("gauged", [True, False])
def test_a_batching_server_is_filled_and_not_flooded(gauged, processes):
    """The report's server is full from about ten in flight; 64 would only make answers late."""
    fleet = Fleet(REPORT, gauged=gauged, processes=processes)
    fleet.run(150)
    assert fleet.run(900) >= 0.92 * 0.57 * 900
    assert 8 <= fleet.in_flight <= 48
    assert fleet.longest < TIMEOUT


@pytest.mark.parametrize("began", [3.7 * number for number in range(12)])
@pytest.mark.parametrize("gauged", [True, False])
def test_a_server_that_answers_in_lumps_is_filled_within_two_minutes(gauged, began):
    """On an H200 what went out together comes back together; 64 in flight bring 4.3 a second."""
    fleet = Fleet(replace(LOCKSTEP, front=12.0), gauged=gauged, began=began)
    fleet.run(100)
    assert fleet.run(100) >= 0.95 * 4.34 * 100
    assert fleet.in_flight <= (128 if gauged else 192)


@pytest.mark.parametrize("began", [0.0, 5.0, 13.0])
def test_a_full_server_stays_full(began):
    """The requests that a trial sends too many must not cost the limit that was right before."""
    fleet = Fleet(H200, gauged=True, began=began)
    fleet.run(300)
    assert fleet.run(900) >= 0.97 * 5.67 * 900
    assert fleet.in_flight <= 100


def test_others_that_leave_the_server_do_not_stop_the_search():
    search, tokens = ConcurrencySearch(Aim(timeout=TIMEOUT)), 0.0
    for second in range(60):
        others, own = (40.0 if second < 12 else 0.0), math.floor(search.limit)
        tokens += 100.0 * others + 300.0 * own
        search.answered(2.0, second)
        search.tick(own, ServerGauges(others + own, 0.0, tokens), second)
    assert search.limit >= 8


@pytest.mark.parametrize("processes", [1, 2, 5, 6, 7, 8])
@pytest.mark.parametrize("gauged", [True, False])
def test_a_server_that_reads_one_at_a_time_is_never_brought_near_the_time_out(gauged, processes):
    fleet = Fleet(SERIAL, gauged=gauged, processes=processes)
    pages = fleet.run(1500)
    assert fleet.longest < TIMEOUT
    assert pages >= 0.85 * 1500 / 11.5
    assert fleet.in_flight <= 8


@pytest.mark.parametrize("began", [0.0, 7.0, 19.0])
def test_no_queue_grows_at_a_server_without_gauges_that_reads_one_at_a_time(began):
    """The default time-out is half an hour, so no answer is ever near it."""
    fleet, most = Fleet(SERIAL, gauged=False, began=began, timeout=1800.0), []
    for _ in range(60):
        fleet.run(100)
        most.append(fleet.in_flight)
    assert max(most) <= 17
    assert max(most[10:]) <= 13
    assert fleet.batch.finished >= 0.95 * 6000 / 11.5


@pytest.mark.parametrize("limit", [0.25, 0.6, 1.3, 2.5, 7.9])
def test_a_limit_between_whole_numbers_is_kept_as_a_mean(limit):
    chance, now, used, ends = random.Random(1), 0.0, 0.0, []
    search = ConcurrencySearch(Aim(share=limit / 64), start=64.0)
    while now < 20_000:
        while search.admits(len(ends), now):
            ends.append((now + (seconds := chance.uniform(5, 15)), seconds))
            ends.sort()
        later = min([now + 1.0, *(end for end, _ in ends)])
        used, now = used + len(ends) * (later - now), later
        while ends and ends[0][0] <= now:
            search.answered(ends.pop(0)[1], now)
    assert used / now == pytest.approx(limit, rel=0.1)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    events=st.lists(st.sampled_from(["answer", "slow", "late", "tick", "full"]), max_size=200),
)
def test_whatever_happens_the_limit_stays_within_its_bounds(seed, events):
    chance, now = random.Random(seed), 0.0
    search = ConcurrencySearch(Aim(timeout=TIMEOUT))
    for event in events:
        now += chance.uniform(0, 20)
        if event == "answer":
            search.answered(chance.uniform(0.01, 30), now)
        elif event == "slow":
            search.answered(chance.uniform(60, 119), now)
        elif event == "late":
            search.timed_out(now)
        else:
            waiting = 500.0 if event == "full" else 0.0
            gauges = chance.choice([None, ServerGauges(chance.uniform(0, 64), waiting, now * 100)])
            search.tick(chance.randrange(64), gauges, now)
        assert TUNING.least <= search.limit <= TUNING.most


def test_a_process_takes_the_part_of_those_that_have_gone_and_gives_it_back():
    search = ConcurrencySearch(Aim(timeout=TIMEOUT), start=4.0)
    search.timed_out(0.0)
    limits = []
    for processes in (8, 7, 4, 1, 2, 8):
        for _ in range(2):
            search.share_with(processes)
        limits.append(search.limit)
    assert limits == [2.0, 2.0, 4.0, 16.0, 8.0, 2.0]


def test_one_document_on_a_server_that_is_known_gets_all_of_it():
    search = ConcurrencySearch(Aim(timeout=TIMEOUT), start=4.0, among=8)
    limits = []
    for processes in (1, 1, 8):
        search.share_with(processes)
        limits.append(search.limit)
    assert limits == [4.0, 32.0, 4.0]


def test_forks_that_begin_beside_each_other_take_no_more_than_their_parts():
    searchs = [ConcurrencySearch(Aim(timeout=TIMEOUT), start=4.0, among=8) for _ in range(8)]
    for seen, search in enumerate(searchs, start=1):
        search.share_with(seen)
    for search in searchs:
        search.share_with(8)
        assert search.limit == 4.0


@pytest.mark.parametrize(("processes", "limit"), [(1, 8.0), (2, 4.0), (8, 1.0), (16, 1.0)])
def test_few_cold_processes_begin_with_as_many_as_eight_would(processes, limit):
    search = ConcurrencySearch(Aim(timeout=TIMEOUT))
    search.share_with(1)
    assert search.limit == 1.0
    search.share_with(processes)
    assert search.limit == limit


@pytest.mark.parametrize("began", [0.0, 3.7, 7.4])
def test_a_cold_server_that_batches_is_full_within_half_a_minute(began):
    """The report's server is full from about ten in flight; its first answers take 18 to 30 s."""
    fleet = Fleet(REPORT, gauged=True, began=began)
    fleet.run(30)
    assert fleet.in_flight >= 14


def test_a_cold_process_is_not_made_smaller_by_those_that_start_beside_it():
    search = ConcurrencySearch(Aim(timeout=TIMEOUT))
    for processes in (1, 8):
        search.share_with(processes)
    assert search.limit == 1.0


@pytest.mark.parametrize("gauged", [True, False])
def test_the_last_documents_get_the_whole_server(gauged):
    fleet = Fleet(REPORT, gauged=gauged)
    for _ in range(180):
        fleet.run(5)
        fleet.share()
    before = fleet.in_flight
    fleet.retire(6)
    for _ in range(2):
        fleet.share()
    fleet.run(60)
    assert fleet.in_flight >= 0.6 * before


@pytest.mark.parametrize("gauged", [True, False])
def test_the_parts_of_the_processes_do_not_drift_apart(gauged):
    fleet = Fleet(REPORT, gauged=gauged)
    for search, start in zip(fleet.searches, [0.5, 0.5, 1, 1, 2, 2, 8, 8], strict=True):
        search.__init__(Aim(timeout=TIMEOUT), start=start)
        search.timed_out(0.0)
    for _ in range(120):
        fleet.run(5)
        fleet.share()
    parts = [search.usual for search in fleet.searches]
    assert max(parts) <= 2 * min(parts)


def test_half_a_share_of_the_server_is_half_of_what_is_found():
    whole, half = (ConcurrencySearch(Aim(share=share), start=8.0) for share in (1.0, 0.5))
    assert (whole.limit, half.limit) == (8.0, 4.0)


@pytest.mark.parametrize(("enabled", "grows"), [(False, True), (True, False)])
def test_the_limit_does_not_grow_while_the_memory_guard_finds_too_little(
    monkeypatch, enabled, grows
):
    monkeypatch.setattr("rag_service.ocr.concurrency.limiter._limiters", {})
    base = get_settings()
    guard = base.memory_guard.model_copy(update={"enabled": enabled, "min_available_mib": 10**9})
    ocr = base.ocr.model_copy(update={"base_url": "http://127.0.0.1:1", "pages_in_flight": "auto"})
    chosen = base.model_copy(update={"ocr": ocr, "memory_guard": guard})
    governor = limiter_for(chosen, start=4.0).governor
    for second in range(120):
        governor.answered(2.0, float(second))
        governor.tick(4, None, float(second))
    assert (governor.limit > 4.0) is grows


@pytest.mark.parametrize("seconds", [0.3, 0.9, 4.0])
def test_short_documents_count_with_the_requests_they_keep_open(seconds):
    """A document begins and ends between two samples; the first report of it is not zero."""
    clock, reported = [100.0], []

    async def read_gauges():
        return None

    async def report(load):
        reported.append(load.in_flight)

    async def go():
        limiter = Limiter(Fixed(4), now=lambda: clock[0])
        for _ in range(math.ceil(8 / seconds)):
            async with limiter.at_work(read_gauges, report):
                await _let_tasks_run()
                async with limiter.request(), limiter.request():
                    clock[0] += seconds
            clock[0] += seconds / 4
        clock[0] += 60.0
        async with limiter.at_work(read_gauges, report):
            await _let_tasks_run()

    asyncio.run(go())
    assert reported[-2] == pytest.approx(2 / 1.25, rel=0.2)
    assert reported[-1] == 0.0


VLLM = """# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="m"} 12.0
vllm:num_requests_running{engine="1",model_name="m"} 8.0
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting_by_reason{reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:generation_tokens_total{engine="0"} 1000.0
"""


def test_gauges_are_added_up_over_engines_and_not_taken_by_prefix():
    assert parse_gauges(VLLM) == ServerGauges(20.0, 3.0, 1000.0, 0.25)
    assert parse_gauges("python_info 1.0\n") is None


@pytest.mark.parametrize("junk", ["NaN", "+Inf", "-4.0", "many"])
def test_a_value_that_no_server_can_have_counted_is_ignored(junk):
    assert parse_gauges(f"vllm:num_requests_running {junk}\n") is None
    text = VLLM.replace("3.0", junk).replace("0.25", junk).replace("1000.0", junk)
    assert parse_gauges(text) == ServerGauges(20.0, 0.0, None, None)


def test_a_cache_use_above_one_is_ignored():
    assert parse_gauges(VLLM.replace("0.25", "17.0")) == ServerGauges(20.0, 3.0, 1000.0, None)
