"""What forks report, what waits for a server, and samples that are kept for a while."""

from datetime import UTC, datetime, timedelta

import pytest

from rag_service.knowledgebase import leases, occupancy, pages, runs, servers
from rag_service.knowledgebase.occupancy import Starvation
from rag_service.occupancy import Judgement, Sample, Verdict
from rag_service.states import PageState, Stage
from tests import simulation as sim

URL = "http://127.0.0.1:5002"
FULL = Judgement(Verdict.SATURATED, "Full.")

pytestmark = pytest.mark.usefixtures("database")


def sample(at, url=URL, **values):
    fields = {
        "running": 8.0, "waiting": 1.0, "slots": 8, "cache_use": 0.4, "in_flight": 9,
        "limit": 9.5, "tokens_per_second": 250.0, "pages_per_minute": 30.0, "pages_waiting": 100,
    }  # fmt: skip
    return Sample(url=url, at=at, **fields | values)


def ago(seconds):
    return datetime.now(UTC) - timedelta(seconds=seconds)


def test_what_forks_have_open_is_added_up_server_by_server():
    occupancy.report_load("a", URL, 3, 4.5)
    occupancy.report_load("b", URL, 2, 4.0)
    occupancy.report_load("c", "http://127.0.0.1:5003", 7, 8.0)
    occupancy.report_load("a", URL, 1, 5.0)
    assert occupancy.in_flight(URL) == 3
    assert occupancy.load(URL) == occupancy.FleetLoad(2, 3, 9.0)
    occupancy.forget_load("a")
    assert occupancy.in_flight(URL) == 2


def test_a_fork_that_reports_no_more_has_nothing_open():
    occupancy.report_load("a", URL, 3, 4.5)
    sim.execute("UPDATE fork_loads SET seen_at = now() - interval '16 seconds'")
    assert occupancy.load(URL) == occupancy.FleetLoad(0, 0, None)


def test_the_good_number_outlives_an_outage_and_its_end():
    assert occupancy.good_in_flight(URL) is None
    occupancy.note_good(URL, 12.5)
    servers.mark_out(URL, "refused", misconfigured=False)
    servers.mark_answered(URL)
    assert occupancy.good_in_flight(URL) == 12.5
    occupancy.note_good(URL, 9)
    assert occupancy.good_in_flight(URL) == 9


def test_samples_come_back_as_they_were_oldest_first():
    first, second = sample(ago(20)), sample(ago(5), running=None, waiting=None, slots=None)
    occupancy.add_sample(second, FULL)
    occupancy.add_sample(first, FULL)
    occupancy.add_sample(sample(ago(700)), FULL)
    kept = occupancy.samples(URL, 600)
    assert [judged.sample for judged in kept] == [first, second]
    assert {judged.judgement for judged in kept} == {FULL}


def test_the_latest_sample_of_each_server():
    other = "http://127.0.0.1:5003"
    newest = [sample(ago(1)), sample(ago(2), url=other)]
    for one in [*newest, sample(ago(30)), sample(ago(40), url=other)]:
        occupancy.add_sample(one, FULL)
    assert [judged.sample for judged in occupancy.latest(60)] == newest
    assert occupancy.latest(0.5) == []
    assert [judged.sample for judged in occupancy.latest(60, other)] == newest[1:]
    assert [judged.sample for judged in occupancy.latest(60, "http://unseen")] == newest


def test_parts_of_requests_add_up():
    """Of documents of one page each fork has something open for a part of the time."""
    for fork in "abc":
        occupancy.report_load(fork, URL, 0.4, 1.0)
    assert occupancy.in_flight(URL) == pytest.approx(1.2)


def test_an_alarm_keeps_its_time_and_tells_the_cause_of_now():
    first = Starvation(ago(400), "The memory guard.")
    assert occupancy.raise_starved(URL, first)
    assert not occupancy.raise_starved(URL, Starvation(ago(100), "Few pages."))
    assert occupancy.starvation(URL) == Starvation(first.since, "Few pages.")


def test_slots_are_learned_only_while_something_waits():
    occupancy.add_sample(sample(ago(3), running=40, waiting=0), FULL)
    assert occupancy.most_running(URL) is None
    occupancy.add_sample(sample(ago(2), running=24, waiting=1), FULL)
    assert occupancy.most_running(URL) == 24


def test_old_samples_are_dropped():
    for seconds in (5, 90, 100):
        occupancy.add_sample(sample(ago(seconds)), FULL)
    assert occupancy.prune(60) == 2
    assert len(occupancy.samples(URL, 1000)) == 1


def test_pages_wait_until_they_are_in_hand():
    sim.ready_run(PageState.PENDING, PageState.PENDING, PageState.NATIVE)
    assert occupancy.demand().pages_waiting == 3
    run = sim.claim(Stage.OCR)
    pages.take_in_hand(run, 1)
    assert occupancy.demand().pages_waiting == 2


def test_pages_that_a_lost_fork_had_in_hand_wait_again():
    sim.ready_run()
    run = sim.claim(Stage.OCR)
    pages.take_in_hand(run, 1)
    assert occupancy.demand().pages_waiting == 0
    leases.release(run)
    assert occupancy.demand().pages_waiting == 1


def test_pages_wait_for_the_return_of_a_server_that_is_out():
    sim.ready_run()
    servers.mark_out(URL, "refused", misconfigured=False)
    assert occupancy.demand().pages_waiting == 1


def test_pages_read_in_the_last_minute_are_counted_also_of_runs_that_ended():
    sim.ready_run(PageState.PENDING, PageState.NATIVE)
    run = sim.claim(Stage.OCR)
    sim.read(run, 1)
    sim.read(run, 2)
    assert occupancy.demand().pages_per_minute == 2
    runs.finish(run)
    assert occupancy.demand().pages_per_minute == 2
    sim.execute("UPDATE pages SET stored_at = stored_at - interval '61 seconds'")
    assert occupancy.demand().pages_per_minute == 0
