"""The retry schedule: number of requests, waits, and the errors that are tried again."""

import asyncio
import pickle
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_service.config.loader import get_settings
from rag_service.config.options import RetryOptions
from rag_service.runtime import retry
from rag_service.runtime.retry import TryAgain, page_schedule, parse_retry_after, wait_before

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
SHIPPED = get_settings().retry


class Server:
    """Fails with each given error in turn, then answers; counts requests and waits."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.requests = 0
        self.waits = []

    async def sleep(self, seconds):
        self.waits.append(seconds)

    async def request(self):
        self.requests += 1
        if self.errors:
            raise self.errors.pop(0)
        return "text"

    def ask(self, settings=SHIPPED):
        return asyncio.run(page_schedule(settings, sleep=self.sleep)(self.request))


def test_the_shipped_schedule_makes_six_requests_in_310_seconds():
    assert SHIPPED.waits == [10, 20, 40, 120, 120]
    assert SHIPPED.jitter == 0.1
    server = Server(*[TryAgain(f"503, number {n}") for n in range(1, 8)])
    with pytest.raises(TryAgain, match="number 6"):
        server.ask()
    assert server.requests == 6
    assert [round(wait, -1) for wait in server.waits] == pytest.approx(SHIPPED.waits, abs=10)
    assert 279 <= sum(server.waits) <= 341


def test_an_answer_ends_the_schedule():
    server = Server(TryAgain("502"), TryAgain("503"))
    assert server.ask() == "text"
    assert server.requests == 3
    assert len(server.waits) == 2


def test_other_errors_come_through_at_once():
    server = Server(TryAgain("503"), ValueError("400"))
    with pytest.raises(ValueError, match="400"):
        server.ask()
    assert server.requests == 2


def test_cancellation_is_never_retried():
    server = Server(asyncio.CancelledError())
    with pytest.raises(asyncio.CancelledError):
        server.ask()
    assert server.requests == 1


def test_waits_by_retry_after_count_as_requests_of_the_schedule():
    server = Server(*[TryAgain("429", retry_after=7) for _ in range(9)])
    with pytest.raises(TryAgain):
        server.ask()
    assert server.requests == 6
    assert all(7 <= wait <= 7.7 for wait in server.waits)


def test_two_pages_wait_for_different_times():
    assert len({wait_before(1, SHIPPED, None) for _ in range(20)}) > 1
    assert len({wait_before(1, SHIPPED, 30) for _ in range(20)}) > 1


def test_try_again_survives_pickling():
    copy = pickle.loads(pickle.dumps(TryAgain("429", retry_after=3.5)))
    assert (str(copy), copy.retry_after) == ("429", 3.5)


retries = st.builds(
    RetryOptions,
    waits=st.lists(st.floats(0, 1000), min_size=1, max_size=8),
    jitter=st.floats(0, 0.99),
    later_wait=st.just(60),
)


@given(retries, st.data())
def test_each_wait_stays_within_the_jitter(settings, data):
    attempt = data.draw(st.integers(1, len(settings.waits)))
    planned = settings.waits[attempt - 1]
    wait = wait_before(attempt, settings, None)
    slack = planned * settings.jitter + 1e-9
    assert planned - slack <= wait <= planned + slack


@given(retries, st.floats(0, allow_nan=False))
def test_the_wait_is_never_shorter_than_retry_after(settings, asked):
    wait = wait_before(1, settings, asked)
    assert wait >= min(asked, retry.LONGEST_RETRY_AFTER)
    assert wait <= retry.LONGEST_RETRY_AFTER * (1 + settings.jitter) + 1e-9


@settings(deadline=None)
@given(retries, st.integers(1, 20))
def test_requests_are_one_more_than_the_waits(settings, failures):
    server = Server(*[TryAgain("503") for _ in range(failures)])
    budget = len(settings.waits) + 1
    if failures < budget:
        assert server.ask(settings) == "text"
    else:
        with pytest.raises(TryAgain):
            server.ask(settings)
    assert server.requests == min(failures + 1, budget)


def test_retry_after_zero_does_not_spend_the_budget_at_once():
    assert wait_before(1, SHIPPED, 0) >= retry.SHORTEST_RETRY_AFTER


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("120", 120), (" 3 ", 3), ("0", 0), ("1.5", 1.5),
        ("Sun, 01 Mar 2026 12:01:30 GMT", 90), ("Sun, 01 Mar 2026 11:00:00 GMT", 0),
        ("Sun, 01 Mar 2026 12:01:30 -0000", 90),
        (None, None), ("", None), ("soon", None), ("-5", None), ("1e3", None), ("٣", None),
        ("Sun, 99 Mar 2026 12:01:30 GMT", None),
    ],
)  # fmt: skip
def test_retry_after_is_read_as_seconds_or_a_date(header, seconds):
    assert parse_retry_after(header, NOW) == seconds


@given(st.text())
def test_an_invalid_header_is_ignored(header):
    seconds = parse_retry_after(header, NOW)
    assert seconds is None or seconds >= 0


@given(st.integers(0, 10**7))
def test_a_date_means_the_seconds_until_then(seconds):
    header = format_datetime(NOW + timedelta(seconds=seconds), usegmt=True)
    assert parse_retry_after(header, NOW) == seconds
