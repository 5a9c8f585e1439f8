"""An OCR server's outage: parked runs, the trial with one page, the outage limit."""

import pytest

from rag_service.database.engine import begin
from rag_service.errors import OcrUnavailable
from rag_service.jobs import leases, runs, server_state
from rag_service.states import PageState, Priority, RunState, ServerState, Stage
from tests import simulation as sim
from tests.simulation import at_once, claim, ready_run, run_row, try_claim

pytestmark = pytest.mark.usefixtures("settings")
URL = "http://ocr"
DAY = 86400


def mark_out(**wishes):
    return server_state.mark_out(URL, "refused", **{"misconfigured": False, **wishes})


def claim_ocr(**wishes):
    return try_claim(Stage.OCR, server=URL, **wishes)


def state():
    return server_state.get(URL).state


def pass_time(interval):
    sim.execute(f"UPDATE ocr_servers SET down_since = down_since - interval '{interval}'")
    sim.execute(f"UPDATE runs SET ready_at = ready_at - interval '{interval}'")


def test_an_unknown_server_blocks_no_claim():
    ready_run()
    assert server_state.get(URL) is None
    assert claim_ocr() is not None


@pytest.mark.parametrize("misconfigured", [False, True])
def test_an_outage_begins_with_its_first_report(misconfigured):
    mark_out(misconfigured=misconfigured)
    first = server_state.get(URL)
    expected = ServerState.MISCONFIGURED if misconfigured else ServerState.DOWN
    assert (first.state, first.message) == (expected, "refused")
    server_state.mark_out(URL, "still", misconfigured=misconfigured)
    again = server_state.get(URL)
    assert (again.message, again.down_since) == ("still", first.down_since)


def test_an_outage_is_reported_as_new_once_in_each_state():
    news = [mark_out(), mark_out(), mark_out(misconfigured=True), mark_out(misconfigured=True)]
    assert news == [True, False, True, False]
    server_state.mark_answered(URL)
    assert mark_out()


def test_alarms_are_kept_beside_the_state_until_they_are_removed():
    server_state.mark_answered(URL)
    assert server_state.get(URL).alarms == {}
    server_state.set_alarms(URL, {"ocr_server": "down: a\nb: c", "no_gpu_workers": "none: \ud800"})
    assert server_state.get(URL).alarms == {"ocr_server": "down: a b: c", "no_gpu_workers": "none:"}
    mark_out()
    server_state.mark_answered(URL)
    assert len(server_state.get(URL).alarms) == 2
    server_state.set_alarms(URL, {})
    assert server_state.get(URL).alarms == {}


def test_a_servers_message_is_cleaned_for_the_database():
    server_state.mark_out(URL, "body: \x00\ud800 end", misconfigured=True)
    server_state.mark_out(URL, "again: \x00\ud800 end", misconfigured=True)
    assert server_state.get(URL).message == "again:   end"


def test_an_answered_page_ends_the_outage():
    run = ready_run()
    mark_out()
    moment = sim.one("SELECT clock_timestamp() AS now").now
    assert server_state.get(URL).last_success_at is None
    server_state.mark_answered(URL)
    record = server_state.get(URL)
    assert record.last_success_at > moment
    assert server_state.get("http://other") is None
    assert (record.state, record.message, record.down_since) == (ServerState.UP, "", None)
    assert claim_ocr().id == run.id


def test_exactly_one_run_tries_and_an_answered_page_ends_the_outage():
    parked = [ready_run().id for _ in range(4)]
    mark_out()
    assert claim_ocr() is None
    assert server_state.begin_trial(URL) == parked[0]
    assert state() is ServerState.TRIAL
    taken = [run for run in at_once(*[claim_ocr] * 4) if run is not None]
    assert [run.id for run in taken] == parked[:1]
    server_state.mark_answered(URL)
    assert {claim_ocr().id for _ in range(3)} == set(parked[1:])


def test_concurrent_probes_begin_one_trial():
    for _ in range(20):
        ready_run()
        mark_out()
        begun = at_once(*[lambda: server_state.begin_trial(URL)] * 4)
        assert sum(run_id is not None for run_id in begun) == 1
        taken = at_once(*[claim_ocr] * 4)
        assert sum(run is not None for run in taken) == 1


def test_the_run_with_the_highest_priority_tries():
    ready_run()
    urgent = ready_run(priority=Priority.INTERACTIVE)
    mark_out()
    assert server_state.begin_trial(URL) == urgent.id


def test_a_run_that_waits_for_a_later_try_does_not_delay_the_trial():
    waiting, due = ready_run(), ready_run()
    leases.release(claim(Stage.OCR), retry_in=3600)
    assert run_row(waiting.id).retry_at is not None
    mark_out()
    assert server_state.begin_trial(URL) == due.id
    assert claim_ocr().id == due.id


def test_the_server_stays_out_if_all_runs_wait_for_a_later_try():
    run = ready_run()
    leases.release(claim(Stage.OCR), retry_in=3600)
    mark_out()
    assert server_state.begin_trial(URL) is None
    assert state() is ServerState.DOWN
    sim.execute("UPDATE runs SET retry_at = now() - interval '1 s'")
    assert server_state.begin_trial(URL) == run.id


def test_a_trial_ends_if_its_run_waits_for_a_later_try():
    first, second = ready_run(), ready_run()
    mark_out()
    assert server_state.begin_trial(URL) == first.id
    leases.release(claim_ocr(), retry_in=60)
    server_state.end_stale_trial(URL)
    assert server_state.begin_trial(URL) == second.id


def test_a_failed_trial_parks_all_runs_again():
    first, second = ready_run(), ready_run()
    mark_out()
    assert server_state.begin_trial(URL) == first.id
    held = claim_ocr()
    mark_out()
    leases.release(held)
    assert claim_ocr() is None
    # The run that has not crashed the server yet.
    assert server_state.begin_trial(URL) == second.id
    row = run_row(first.id)
    assert (row.crashes, row.expiries) == (0, 0)


def test_a_trial_ends_if_its_run_has_nothing_to_send():
    first, second = ready_run(), ready_run()
    mark_out()
    assert server_state.begin_trial(URL) == first.id
    assert claim_ocr().id == first.id
    server_state.end_trial(URL, second.id)
    assert state() is ServerState.TRIAL
    server_state.end_trial(URL, first.id)
    assert state() is ServerState.DOWN
    assert server_state.begin_trial(URL) == second.id
    server_state.mark_answered(URL)
    server_state.end_trial(URL, second.id)
    assert state() is ServerState.UP


def test_a_trial_survives_the_crash_of_its_worker():
    run = ready_run()
    mark_out()
    server_state.begin_trial(URL)
    claim_ocr(task="t")
    leases.release_crashed("worker", "t", sim.lease())
    server_state.end_stale_trial(URL)
    assert state() is ServerState.TRIAL
    assert claim_ocr().id == run.id


@pytest.mark.parametrize("how", ["cancelled", "failed", "removed"])
def test_a_trial_ends_with_its_run(how):
    run = ready_run()
    other = ready_run()
    mark_out()
    assert server_state.begin_trial(URL) == run.id
    if how == "removed":
        sim.execute("DELETE FROM runs WHERE id = :id", id=run.id)
    else:
        sim.execute("UPDATE runs SET state = :how WHERE id = :id", how=how, id=run.id)
    assert claim_ocr() is None
    server_state.end_stale_trial(URL)
    assert state() is ServerState.DOWN
    assert server_state.begin_trial(URL) == other.id


@pytest.mark.parametrize("held", [False, True])
def test_a_trial_in_progress_is_not_ended(held):
    ready_run()
    mark_out()
    server_state.begin_trial(URL)
    if held:
        claim_ocr()
    server_state.end_stale_trial(URL)
    assert state() is ServerState.TRIAL


def test_a_server_without_waiting_runs_counts_as_up():
    mark_out()
    assert server_state.begin_trial(URL) is None
    record = server_state.get(URL)
    assert (record.state, record.down_since, record.message) == (ServerState.UP, None, "")


def test_a_server_that_is_up_needs_no_trial():
    ready_run()
    server_state.mark_answered(URL)
    assert server_state.begin_trial(URL) is None
    assert state() is ServerState.UP


def test_parked_runs_fail_at_the_outage_limit():
    run = ready_run(PageState.NATIVE)
    sim.add_document()
    mark_out()
    pass_time("23 hours 59 minutes")
    assert server_state.fail_long_parked(URL, DAY, OcrUnavailable()) == 0
    pass_time("2 minutes")
    assert server_state.fail_long_parked(URL, DAY, OcrUnavailable("refused")) == 1
    row = run_row(run.id)
    assert (row.state, row.error_code, row.error_retryable) == ("failed", "ocr_unavailable", True)
    assert sim.document_row(run.document_id).current_run_id == run.id
    assert try_claim(Stage.PREPARE) is not None


def test_the_outage_limit_counts_from_when_a_run_became_ready():
    mark_out()
    pass_time("3 days")
    run = ready_run()
    assert server_state.fail_long_parked(URL, DAY, OcrUnavailable()) == 0
    assert run_row(run.id).state == RunState.READY


def test_a_long_run_does_not_fail_when_an_outage_begins():
    ready_run()
    pass_time("3 days")
    mark_out()
    assert server_state.fail_long_parked(URL, DAY, OcrUnavailable()) == 0


def test_an_answered_page_restarts_the_outage_limit():
    ready_run()
    mark_out()
    pass_time("3 days")
    server_state.mark_answered(URL)
    assert server_state.fail_long_parked(URL, DAY, OcrUnavailable()) == 0
    mark_out()
    assert server_state.fail_long_parked(URL, DAY, OcrUnavailable()) == 0


def test_a_run_that_is_being_claimed_for_the_trial_does_not_fail():
    run = ready_run()
    mark_out()
    pass_time("2 days")
    server_state.begin_trial(URL)
    with begin() as connection:
        connection.exec_driver_sql("UPDATE runs SET state = 'ocr'")
        assert server_state.fail_long_parked(URL, DAY, OcrUnavailable()) == 0
    assert run_row(run.id).state == RunState.OCR


def test_no_wake_up_messages_are_wanted_for_parked_runs():
    ready_run()
    ready_run()
    mark_out()
    assert runs.next_claimable(Stage.OCR, URL, 9) == []
    trial = server_state.begin_trial(URL)
    assert [target.run_id for target in runs.next_claimable(Stage.OCR, URL, 9)] == [trial]
