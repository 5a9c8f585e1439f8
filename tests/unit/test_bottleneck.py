"""Verdicts on measured and on arbitrary samples."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_service.diagnosis.bottleneck import ClientMode, JobQueue, LoadSample, Verdict, diagnose

AUTO = ClientMode()
FIXED = ClientMode(adaptive=False)
JOBS = ClientMode(remote=True)
QUEUED = ClientMode(remote=True, jobs=JobQueue(live=3, queued=3, most_pages=30, pages_limit=30))
SMALL = ClientMode(remote=True, jobs=JobQueue(live=3, queued=1, most_pages=6, pages_limit=30))
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
    ("expected", "mode", "taken"),
    [
        (Verdict.IDLE, AUTO, {}),
        # One page at a time of 8 documents, as in the original report.
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
            AUTO,
            {"running": 20.9, "in_flight": 32, "limit": 33, "pages_waiting": 500},
        ),
        # Six API processes: nearly all requests in flight run, and `auto` found no gain in more.
        (
            Verdict.SATURATED,
            AUTO,
            {"running": 51.6, "in_flight": 64, "limit": 66, "pages_waiting": 500},
        ),
        (Verdict.SATURATED, FIXED, {"running": 63, "waiting": 2, "in_flight": 66, "limit": 66}),
        (Verdict.OVERLOADED, FIXED, {"running": 56.7, "waiting": 43, "in_flight": 128}),
        (
            Verdict.KV_BOUND,
            AUTO,
            {"running": 30, "waiting": 1, "cache_use": 0.97, "in_flight": 31, "limit": 32},
        ),
        (
            Verdict.SERIALISING,
            FIXED,
            {"running": 1, "waiting": 15, "slots": None, "in_flight": 16, "limit": 16},
        ),
        (
            Verdict.SERIALISING,
            AUTO,
            {"running": 1, "waiting": 1, "slots": 1, "in_flight": 2},
        ),
        # The workers cannot use the limit that their search found.
        (
            Verdict.STARVED,
            AUTO,
            {"running": 5, "in_flight": 6, "limit": 40, "pages_waiting": 500},
        ),
        (Verdict.STARVED, AUTO, {"pages_waiting": 500}),
        (Verdict.IDLE, AUTO, {"running": 5, "in_flight": 5, "limit": 40}),
        # A sample of one slot shows all or nothing: between two pages nothing runs.
        (
            Verdict.SATURATED,
            FIXED,
            {"running": 0.75, "slots": 1, "in_flight": 1.6, "limit": 4, "pages_waiting": 19},
        ),
        (Verdict.STARVED, JOBS, {"running": 20, "in_flight": 90, "pages_waiting": 500}),
        (Verdict.SATURATED, JOBS, {"running": 40, "in_flight": 90, "pages_waiting": 500}),
        (Verdict.UNKNOWN, JOBS, {"running": 20, "slots": None, "pages_waiting": 500}),
        (Verdict.UNKNOWN, QUEUED, {"running": None, "waiting": None, "pages_waiting": 500}),
        (Verdict.UNKNOWN, QUEUED, {"running": 20, "in_flight": 90, "pages_waiting": 500}),
        (Verdict.UNKNOWN, QUEUED, {"running": 20, "in_flight": 90}),
        (Verdict.SATURATED, SMALL, {"running": 5, "in_flight": 18, "pages_waiting": 500}),
        (Verdict.UNKNOWN, JOBS, {"running": None, "waiting": None, "in_flight": 30}),
    ],
)
def test_verdict_over_a_minute(expected, mode, taken):
    assert diagnose(minute(**taken), mode).verdict is expected


NO_GAUGES = {"running": None, "waiting": None, "cache_use": None, "slots": None}


@pytest.mark.parametrize(
    ("expected", "mode", "in_flight", "limit"),
    [
        (Verdict.SERIALISING, AUTO, 1, 1.5),
        (Verdict.SATURATED, AUTO, 24, 25),
        (Verdict.STARVED, AUTO, 6, 40),
        (Verdict.UNKNOWN, FIXED, 64, 64),
    ],
)
def test_a_server_without_gauges_is_diagnosed_by_the_result_of_the_search(
    expected, mode, in_flight, limit
):
    taken = minute(**NO_GAUGES, in_flight=in_flight, limit=limit, pages_waiting=500)
    assert diagnose(taken, mode).verdict is expected


def test_the_verdict_is_unknown_while_the_search_changes_the_number_in_flight():
    taken = [sample(running=n, in_flight=n, limit=n, pages_waiting=99) for n in (8, 16, 32)]
    assert diagnose(taken).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("words", "mode", "taken"),
    [
        ("--api-server-count", FIXED, {"running": 33.6, "in_flight": 64, "pages_waiting": 9}),
        ("`auto`", FIXED, {"running": 7, "in_flight": 8, "limit": 8, "pages_waiting": 9}),
        ("OCR_WORKER_CONCURRENCY", AUTO, {"in_flight": 2, "limit": 40, "pages_waiting": 9}),
        ("check the ocr workers", AUTO, {"pages_waiting": 9}),
        ("memory_guard", ClientMode(low_memory=True), {"limit": 40, "pages_waiting": 9}),
        (
            "--gpu-memory-utilization",
            AUTO,
            {"running": 30, "cache_use": 0.95, "in_flight": 30},
        ),
        ("max_pages_per_job", JOBS, {"running": 9, "in_flight": 9, "pages_waiting": 9}),
        ("3 jobs on RunPod, none at work", QUEUED, {"running": None, "in_flight": 90}),
        ("no job has more than 6 pages", SMALL, {"running": 5, "in_flight": 9, "pages_waiting": 9}),
    ],
)
def test_the_sentence_says_what_to_do(words, mode, taken):
    assert words in diagnose(minute(**taken), mode).sentence


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
modes = st.builds(ClientMode, st.booleans(), st.booleans(), st.booleans())


@given(samples, modes)
def test_never_starved_if_no_page_waits(taken, mode):
    ended = [*taken, sample(running=1.0, in_flight=1, pages_waiting=0)]
    assert diagnose(ended, mode).verdict is not Verdict.STARVED


@given(samples, modes)
def test_starved_only_if_few_requests_wait_and_slots_are_free(taken, mode):
    if diagnose(taken, mode).verdict is not Verdict.STARVED:
        return
    waiting = [s.waiting for s in taken if s.waiting is not None]
    running = [s.running for s in taken if s.running is not None]
    slots = next((s.slots for s in reversed(taken) if s.slots), None)
    assert not waiting or sum(waiting) / len(waiting) < 0.5
    assert not running or slots is None or sum(running) / len(running) < 0.9 * slots


@given(samples, modes)
def test_every_verdict_has_a_sentence(taken, mode):
    sentence = diagnose(taken, mode).sentence
    assert sentence.endswith(".")
    assert "None" not in sentence


@given(st.integers(1, 300), st.integers(2, 64), modes)
def test_an_empty_server_with_pages_waiting_is_always_starved(pages, slots, mode):
    taken = minute(slots=slots, pages_waiting=pages)
    assert diagnose(taken, mode).verdict is Verdict.STARVED


def test_a_server_without_work_in_the_last_sample_is_idle():
    busy = sample(running=1, waiting=2, in_flight=3, limit=3, slots=1)
    assert diagnose([busy, busy, busy]).verdict is Verdict.SERIALISING
    over = diagnose([busy, busy, busy, sample(slots=1)])
    assert (over.verdict, over.sentence) == (Verdict.IDLE, "No page waits for the server.")


def test_pages_in_the_last_sample_only_make_the_verdict_unknown():
    """Neither `idle` nor another client's requests if the last sample shows waiting pages."""
    last = sample(pages_waiting=493, running=3, in_flight=3, limit=8)
    for mode in (AUTO, FIXED):
        found = diagnose([sample(), sample(), last], mode)
        assert (found.verdict, found.sentence[:14]) == (Verdict.UNKNOWN, "493 pages wait")
        ungauged = diagnose([sample(**NO_GAUGES), sample(**NO_GAUGES, pages_waiting=107)], mode)
        assert ungauged.verdict is Verdict.UNKNOWN


def test_requests_of_forks_that_died_do_not_count_as_in_the_front_end():
    """The mean still contains them; the last sample decides."""
    busy = sample(running=30, in_flight=61, limit=64, pages_waiting=900)
    dead = sample(in_flight=0, pages_waiting=900)
    assert diagnose([busy, busy]).verdict is Verdict.FRONT_END_BOUND
    assert diagnose([busy, busy, dead]).verdict is not Verdict.FRONT_END_BOUND
    found = diagnose([busy, busy, dead, dead])
    assert (found.verdict, "check the ocr workers" in found.sentence) == (Verdict.STARVED, True)


def test_the_sentence_counts_the_pages_of_the_last_sample():
    taken = [sample(pages_waiting=n, limit=40) for n in (500, 3, 225)]
    assert diagnose(taken).sentence.startswith("225 pages wait, but")
    assert diagnose([sample(pages_waiting=1)]).sentence.startswith("1 page waits, but")


def test_requests_of_another_client_are_named_as_such():
    found = diagnose(minute(running=5))
    assert found.verdict is Verdict.IDLE
    assert "another client" in found.sentence
