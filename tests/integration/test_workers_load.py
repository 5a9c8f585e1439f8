"""What forks share about a server: the good number in flight is kept if all forks use it."""

from __future__ import annotations

import asyncio

import pytest

from rag_service.jobs import fork_loads, limit_changes, live_workers
from rag_service.ocr.concurrency.changes import ChangeLog, ChangeReason
from rag_service.ocr.concurrency.limiter import LimiterLoad, Together
from rag_service.states import Stage

URL = "http://127.0.0.1:5002"
BESIDE = ["a", "b", "c"]


class RunningGuard:
    """Stands in for the guard of a run whose lease is valid."""

    async def call(self, function):
        return function()


@pytest.fixture
def watch(settings, monkeypatch):
    # The task's module needs a broker's address, which only the settings of a test have.
    from workers import server_watch

    monkeypatch.setattr(server_watch, "_LOAD_NOTE_SECONDS", 0.0)
    monkeypatch.setattr(server_watch, "_url", lambda: URL)
    return server_watch.SharedServerWatch(RunningGuard())


def report(watch, *, in_flight=8, limit=8.0, is_settled=True, beside=BESIDE):
    for fork in beside:
        fork_loads.report(fork, URL, in_flight, limit)
    return asyncio.run(watch.report(LimiterLoad(in_flight, limit, is_settled)))


def test_forks_know_the_load_of_all_forks(watch):
    assert report(watch, limit=6.0) == Together(4, 24.0)


def test_the_number_in_use_is_kept_when_the_search_has_settled(watch):
    for _ in range(3):
        report(watch, is_settled=False)
    assert fork_loads.good_in_flight(URL) is None
    for _ in range(3):
        report(watch)
    assert fork_loads.good_in_flight(URL) == 32.0


def test_the_last_documents_do_not_lower_the_kept_number(watch):
    for _ in range(3):
        report(watch)
    for fork in "ab":
        fork_loads.remove(fork)
    for _ in range(2):
        report(watch, beside=["c"])
    assert fork_loads.good_in_flight(URL) == 32.0
    for _ in range(3):
        report(watch, in_flight=4, beside=["c"])
    assert fork_loads.good_in_flight(URL) == 32.0


def test_a_fork_begins_with_its_part_among_the_forks_of_all_machines(watch):
    fork_loads.store_good_in_flight(URL, 64)
    for machine in "ab":
        live_workers.heartbeat(f"ocr@{machine}:1:x", Stage.OCR, 8)
    live_workers.heartbeat("prepare@a:2:x", Stage.PREPARE, 4)
    assert asyncio.run(watch.processes()) == 16
    assert asyncio.run(watch.good_limit()) == 4.0


def test_the_first_page_is_reported_at_once_and_other_forks_are_read_at_the_usual_pace(
    watch, monkeypatch
):
    """A fork missing in two reads loses its part, so two reads must not follow at once."""
    from workers import server_watch

    monkeypatch.setattr(server_watch, "_LOAD_NOTE_SECONDS", 5.0)
    assert report(watch, in_flight=0) == Together(4, 32.0)
    assert report(watch, in_flight=0.4, beside=[]) is None
    assert fork_loads.in_flight(URL) == pytest.approx(0.4)
    assert report(watch, in_flight=8, beside=[]) is None
    assert fork_loads.in_flight(URL) == pytest.approx(0.4)


def test_reasons_for_changes_are_counted_over_all_forks_with_the_last_change(watch):
    for old in (8.0, 10.0):
        changes = ChangeLog()
        changes.add(old, old * 2, ChangeReason.DOUBLED)
        changes.add(old * 2, old * 2.5, ChangeReason.TRIED_MORE)
        asyncio.run(watch.report(LimiterLoad(8, 8.0, is_settled=False, changes=changes)))
        assert changes.take() == {}
    found = {each.reason: each for each in limit_changes.last_changes(URL)}
    assert {reason: each.count for reason, each in found.items()} == {
        ChangeReason.DOUBLED: 2,
        ChangeReason.TRIED_MORE: 2,
    }
    doubled = found[ChangeReason.DOUBLED]
    assert (doubled.old, doubled.new) == (10.0, 20.0)
    assert limit_changes.last_changes("http://127.0.0.1:5999") == []
