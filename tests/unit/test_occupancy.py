"""Who is the bottleneck: verdicts over measured and over any samples."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_service.diagnosis.bottleneck import Feed, LoadSample, Verdict, diagnose

FIXED = Feed(adaptive=False)
JOBS = Feed(remote=True)
START = datetime(2026, 1, 1, tzinfo=UTC)


def sample(**values):
    fields = {
        "running": 0.0, "waiting": 0.0, "slots": 64, "cache_use": 0.3, "in_flight": 0,
        "limit": None, "tokens_per_second": None, "pages_per_minute": 0.0, "pages_waiting": 0,
    }  # fmt: skip
    return LoadSample("http://127.0.0.1:5002", START, **fields | values)


def minute(**values):
    return [sample(**values)] * 4


@pytest.mark.parametrize(
    ("expected", "feed", "seen"),
    [
        (Verdict.IDLE, Feed(), {}),
        # One page at a time, 8 documents: what wasted the report's GPU for months.
        (
            Verdict.STARVED,
            FIXED,
            {"running": 7.6, "in_flight": 8, "limit": 8, "pages_waiting": 500},
        ),
        # The H200's front end: 64 in flight, one API process, 200 DPI.
        (
            Verdict.FRONT_END_BOUND,
            FIXED,
            {"running": 33.6, "in_flight": 64, "limit": 64, "pages_waiting": 500},
        ),
        (
            Verdict.FRONT_END_BOUND,
            Feed(),
            {"running": 20.9, "in_flight": 32, "limit": 33, "pages_waiting": 500},
        ),
        # Six API processes: nearly all that is in flight runs, and `auto` found no gain in more.
        (
            Verdict.SATURATED,
            Feed(),
            {"running": 51.6, "in_flight": 64, "limit": 66, "pages_waiting": 500},
        ),
        (Verdict.SATURATED, FIXED, {"running": 63, "waiting": 2, "in_flight": 66, "limit": 66}),
        (Verdict.OVERLOADED, FIXED, {"running": 56.7, "waiting": 43, "in_flight": 128}),
        (
            Verdict.KV_BOUND,
            Feed(),
            {"running": 30, "waiting": 1, "cache_use": 0.97, "in_flight": 31, "limit": 32},
        ),
        (
            Verdict.SERIALISING,
            FIXED,
            {"running": 1, "waiting": 15, "slots": None, "in_flight": 16, "limit": 16},
        ),
        (Verdict.SERIALISING, Feed(), {"running": 1, "waiting": 1, "slots": 1, "in_flight": 2}),
        # Our workers cannot fill the places that their search allows.
        (
            Verdict.STARVED,
            Feed(),
            {"running": 5, "in_flight": 6, "limit": 40, "pages_waiting": 500},
        ),
        (Verdict.STARVED, Feed(), {"pages_waiting": 500}),
        (Verdict.IDLE, Feed(), {"running": 5, "in_flight": 5, "limit": 40}),
        # Of one slot a look sees all or nothing: between two pages nothing runs.
        (
            Verdict.SATURATED,
            FIXED,
            {"running": 0.75, "slots": 1, "in_flight": 1.6, "limit": 4, "pages_waiting": 19},
        ),
        (Verdict.STARVED, JOBS, {"running": 20, "in_flight": 90, "pages_waiting": 500}),
        (Verdict.SATURATED, JOBS, {"running": 40, "in_flight": 90, "pages_waiting": 500}),
        (Verdict.UNKNOWN, JOBS, {"running": 20, "slots": None, "pages_waiting": 500}),
        (Verdict.UNKNOWN, JOBS, {"running": None, "waiting": None, "in_flight": 30}),
    ],
)
def test_the_verdict_over_a_minute(expected, feed, seen):
    assert diagnose(minute(**seen), feed).verdict is expected


NO_GAUGES = {"running": None, "waiting": None, "cache_use": None, "slots": None}


@pytest.mark.parametrize(
    ("expected", "feed", "in_flight", "limit"),
    [
        (Verdict.SERIALISING, Feed(), 1, 1.5),
        (Verdict.SATURATED, Feed(), 24, 25),
        (Verdict.STARVED, Feed(), 6, 40),
        (Verdict.UNKNOWN, FIXED, 64, 64),
    ],
)
def test_a_server_without_gauges_is_judged_by_what_our_forks_found(
    expected, feed, in_flight, limit
):
    seen = minute(**NO_GAUGES, in_flight=in_flight, limit=limit, pages_waiting=500)
    assert diagnose(seen, feed).verdict is expected


def test_nothing_is_said_while_the_number_in_flight_is_looked_for():
    seen = [sample(running=n, in_flight=n, limit=n, pages_waiting=99) for n in (8, 16, 32)]
    assert diagnose(seen).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("words", "feed", "seen"),
    [
        ("--api-server-count", FIXED, {"running": 33.6, "in_flight": 64, "pages_waiting": 9}),
        ("`auto`", FIXED, {"running": 7, "in_flight": 8, "limit": 8, "pages_waiting": 9}),
        ("OCR_WORKER_CONCURRENCY", Feed(), {"in_flight": 2, "limit": 40, "pages_waiting": 9}),
        ("look at the ocr workers", Feed(), {"pages_waiting": 9}),
        ("memory_guard", Feed(low_memory=True), {"limit": 40, "pages_waiting": 9}),
        ("--gpu-memory-utilization", Feed(), {"running": 30, "cache_use": 0.95, "in_flight": 30}),
        ("max_pages_per_job", JOBS, {"running": 9, "in_flight": 9, "pages_waiting": 9}),
    ],
)
def test_the_sentence_says_what_to_do(words, feed, seen):
    assert words in diagnose(minute(**seen), feed).sentence


counts = st.integers(0, 300)
figures = st.floats(0, 300)
samples = st.lists(
    st.builds(
        LoadSample,
        url=st.just("http://127.0.0.1:5002"),
        at=st.just(START),
        running=st.none() | figures,
        waiting=st.none() | figures,
        slots=st.none() | st.integers(1, 300),
        cache_use=st.none() | st.floats(0, 1),
        in_flight=figures,
        limit=st.none() | figures,
        tokens_per_second=st.none() | figures,
        pages_per_minute=figures,
        pages_waiting=counts,
    ),
    max_size=5,
)
feeds = st.builds(Feed, st.booleans(), st.booleans(), st.booleans())


@given(samples, feeds)
def test_never_starved_where_no_page_waits(seen, feed):
    spared = [*seen, sample(running=1.0, in_flight=1, pages_waiting=0)]
    assert diagnose(spared, feed).verdict is not Verdict.STARVED


@given(samples, feeds)
def test_starved_only_while_few_wait_in_the_server_and_slots_are_free(seen, feed):
    if diagnose(seen, feed).verdict is not Verdict.STARVED:
        return
    waiting = [s.waiting for s in seen if s.waiting is not None]
    running = [s.running for s in seen if s.running is not None]
    slots = next((s.slots for s in reversed(seen) if s.slots), None)
    assert not waiting or sum(waiting) / len(waiting) < 0.5
    assert not running or slots is None or sum(running) / len(running) < 0.9 * slots


@given(samples, feeds)
def test_every_verdict_has_a_sentence(seen, feed):
    sentence = diagnose(seen, feed).sentence
    assert sentence.endswith(".")
    assert "None" not in sentence


@given(st.integers(1, 300), st.integers(2, 64), feeds)
def test_an_empty_server_with_pages_waiting_is_always_starved(pages, slots, feed):
    seen = minute(slots=slots, pages_waiting=pages)
    assert diagnose(seen, feed).verdict is Verdict.STARVED


def test_a_server_that_has_just_run_out_of_work_is_idle_whatever_it_did_before():
    busy = sample(running=1, waiting=2, in_flight=3, limit=3, slots=1)
    assert diagnose([busy, busy, busy]).verdict is Verdict.SERIALISING
    over = diagnose([busy, busy, busy, sample(slots=1)])
    assert (over.verdict, over.sentence) == (Verdict.IDLE, "Nothing waits for it.")


def test_pages_that_have_just_come_are_not_denied():
    """Neither `Nothing waits` nor another client, where the last look saw pages of ours."""
    come = sample(pages_waiting=493, running=3, in_flight=3, limit=8)
    for feed in (Feed(), FIXED):
        found = diagnose([sample(), sample(), come], feed)
        assert (found.verdict, found.sentence[:14]) == (Verdict.UNKNOWN, "493 pages wait")
        ungauged = diagnose([sample(**NO_GAUGES), sample(**NO_GAUGES, pages_waiting=107)], feed)
        assert ungauged.verdict is Verdict.UNKNOWN


def test_forks_that_died_are_not_in_the_front_end():
    """The mean remembers them; what to do is said of now."""
    busy = sample(running=30, in_flight=61, limit=64, pages_waiting=900)
    dead = sample(in_flight=0, pages_waiting=900)
    assert diagnose([busy, busy]).verdict is Verdict.FRONT_END_BOUND
    assert diagnose([busy, busy, dead]).verdict is not Verdict.FRONT_END_BOUND
    found = diagnose([busy, busy, dead, dead])
    assert (found.verdict, "look at the ocr workers" in found.sentence) == (Verdict.STARVED, True)


def test_the_sentence_counts_the_pages_that_wait_now():
    seen = [sample(pages_waiting=n, limit=40) for n in (500, 3, 225)]
    assert diagnose(seen).sentence.startswith("225 pages wait, but")
    assert diagnose([sample(pages_waiting=1)]).sentence.startswith("1 page waits, but")


def test_what_another_client_has_running_is_not_called_ours():
    found = diagnose(minute(running=5))
    assert found.verdict is Verdict.IDLE
    assert "another client" in found.sentence
