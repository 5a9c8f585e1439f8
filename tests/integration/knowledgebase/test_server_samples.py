"""Reports of forks, the queue of pages, and stored samples of a server."""

from datetime import UTC, datetime, timedelta

import pytest

from rag_service.diagnosis.bottleneck import Diagnosis, LoadSample, Verdict
from rag_service.jobs import fork_loads, leases, run_pages, runs, server_samples, server_state
from rag_service.jobs.server_samples import Starvation
from rag_service.states import PageState, Stage
from tests import simulation as sim

URL = "http://127.0.0.1:5002"
FULL = Diagnosis(Verdict.SATURATED, "Full.")

pytestmark = pytest.mark.usefixtures("database")


def sample(at, url=URL, **values):
    fields = {
        "running": 8.0, "waiting": 1.0, "slots": 8, "cache_use": 0.4, "in_flight": 9,
        "limit": 9.5, "tokens_per_second": 250.0, "pages_per_minute": 30.0, "pages_waiting": 100,
    }  # fmt: skip
    return LoadSample(url=url, at=at, **fields | values)


def ago(seconds):
    return datetime.now(UTC) - timedelta(seconds=seconds)


def test_what_forks_have_open_is_added_up_server_by_server():
    fork_loads.report("a", URL, 3, 4.5)
    fork_loads.report("b", URL, 2, 4.0)
    fork_loads.report("c", "http://127.0.0.1:5003", 7, 8.0)
    fork_loads.report("a", URL, 1, 5.0)
    assert fork_loads.in_flight(URL) == 3
    assert fork_loads.total(URL) == fork_loads.TotalLoad(2, 3, 9.0)
    fork_loads.remove("a")
    assert fork_loads.in_flight(URL) == 2


def test_a_fork_without_recent_reports_does_not_count():
    fork_loads.report("a", URL, 3, 4.5)
    sim.execute("UPDATE fork_loads SET seen_at = now() - interval '16 seconds'")
    assert fork_loads.total(URL) == fork_loads.TotalLoad(0, 0, None)


def test_the_good_number_in_flight_survives_an_outage():
    assert fork_loads.good_in_flight(URL) is None
    fork_loads.store_good_in_flight(URL, 12.5)
    server_state.mark_out(URL, "refused", misconfigured=False)
    server_state.mark_answered(URL)
    assert fork_loads.good_in_flight(URL) == 12.5
    fork_loads.store_good_in_flight(URL, 9)
    assert fork_loads.good_in_flight(URL) == 9


def test_samples_are_returned_as_stored_oldest_first():
    first, second = sample(ago(20)), sample(ago(5), running=None, waiting=None, slots=None)
    server_samples.add_sample(second, FULL)
    server_samples.add_sample(first, FULL)
    server_samples.add_sample(sample(ago(700)), FULL)
    kept = server_samples.samples(URL, 600)
    assert [one.sample for one in kept] == [first, second]
    assert {one.diagnosis for one in kept} == {FULL}


def test_the_latest_sample_of_each_server():
    other = "http://127.0.0.1:5003"
    newest = [sample(ago(1)), sample(ago(2), url=other)]
    for one in [*newest, sample(ago(30)), sample(ago(40), url=other)]:
        server_samples.add_sample(one, FULL)
    assert [one.sample for one in server_samples.latest(60)] == newest
    assert server_samples.latest(0.5) == []
    assert [one.sample for one in server_samples.latest(60, other)] == newest[1:]
    assert [one.sample for one in server_samples.latest(60, "http://unseen")] == newest


def test_means_below_one_request_add_up():
    """With documents of one page, each fork has an open request for a part of the time."""
    for fork in "abc":
        fork_loads.report(fork, URL, 0.4, 1.0)
    assert fork_loads.in_flight(URL) == pytest.approx(1.2)


def test_an_alarm_keeps_its_start_and_updates_its_cause():
    first = Starvation(ago(400), "The memory guard.")
    assert server_samples.raise_starved(URL, first)
    assert not server_samples.raise_starved(URL, Starvation(ago(100), "Few pages."))
    assert server_samples.starvation(URL) == Starvation(first.since, "Few pages.")


def test_slots_are_learned_only_while_requests_wait():
    server_samples.add_sample(sample(ago(3), running=40, waiting=0), FULL)
    assert server_samples.most_running(URL) is None
    server_samples.add_sample(sample(ago(2), running=24, waiting=1), FULL)
    assert server_samples.most_running(URL) == 24


def test_old_samples_are_removed():
    for seconds in (5, 90, 100):
        server_samples.add_sample(sample(ago(seconds)), FULL)
    assert server_samples.remove_older(60) == 2
    assert len(server_samples.samples(URL, 1000)) == 1


def test_pages_wait_until_they_are_in_progress():
    sim.ready_run(PageState.PENDING, PageState.PENDING, PageState.NATIVE)
    assert server_samples.page_queue().pages_waiting == 3
    run = sim.claim(Stage.OCR)
    run_pages.mark_in_progress(run, 1)
    assert server_samples.page_queue().pages_waiting == 2


def test_pages_in_progress_wait_again_after_a_release():
    sim.ready_run()
    run = sim.claim(Stage.OCR)
    run_pages.mark_in_progress(run, 1)
    assert server_samples.page_queue().pages_waiting == 0
    leases.release(run)
    assert server_samples.page_queue().pages_waiting == 1


def test_pages_wait_while_the_server_is_out():
    sim.ready_run()
    server_state.mark_out(URL, "refused", misconfigured=False)
    assert server_samples.page_queue().pages_waiting == 1


def test_pages_per_minute_include_runs_that_ended():
    sim.ready_run(PageState.PENDING, PageState.NATIVE)
    run = sim.claim(Stage.OCR)
    sim.read(run, 1)
    sim.read(run, 2)
    assert server_samples.page_queue().pages_per_minute == 2
    runs.finish(run)
    assert server_samples.page_queue().pages_per_minute == 2
    sim.execute("UPDATE pages SET stored_at = stored_at - interval '61 seconds'")
    assert server_samples.page_queue().pages_per_minute == 0
