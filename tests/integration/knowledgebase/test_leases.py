"""Claims, renewals, releases, crashes and expiries of leases."""

import threading
import uuid

import pytest
from sqlalchemy import text

from rag_service.database import document_rows
from rag_service.database.engine import DatabaseError, begin, get_engine, is_outage
from rag_service.errors import Internal, LeaseLost
from rag_service.jobs import leases, run_pages, runs, server_state
from rag_service.jobs.leases import Blame
from rag_service.states import PageState, Priority, RunState, Stage
from tests import simulation as sim
from tests.simulation import at_once, claim, everything, expire, lease, run_row, try_claim

pytestmark = pytest.mark.usefixtures("settings")
ROUNDS = 20


def test_claims_are_interactive_first_then_oldest_first():
    bulk = [sim.add_document() for _ in range(3)]
    urgent = [sim.add_document(Priority.INTERACTIVE) for _ in range(2)]
    assert [claim().document_id for _ in range(5)] == urgent + bulk
    assert try_claim() is None


def test_a_claim_returns_the_run_and_stores_the_lease():
    document_id = sim.add_document()
    run = claim(task="task 1")
    row = run_row(run.id)
    assert (run.document_id, run.filename, run.epoch) == (document_id, "a.pdf", 1)
    assert (row.state, row.lease_worker, row.lease_task) == ("preparing", "worker", "task 1")
    assert 59 < (row.lease_expires_at - row.held_since).total_seconds() < 61


def test_each_stage_claims_its_own_runs():
    run = sim.ready_run()
    assert try_claim(Stage.PREPARE) is None
    again = claim(Stage.OCR)
    assert (again.id, again.epoch) == (run.id, 2)
    assert run_row(run.id).state == RunState.OCR


def test_concurrent_claims_never_get_the_same_run():
    for _ in range(ROUNDS):
        waiting = {sim.add_document() for _ in range(3)}
        taken = [r for r in at_once(*[try_claim] * 2, *[lambda: try_claim(worker="b")] * 2) if r]
        assert {run.document_id for run in taken} == waiting
        assert len(taken) == 3


@pytest.mark.parametrize(("forks", "places"), [(1, 1), (2, 1), (3, 2)])
def test_bulk_runs_never_take_the_last_of_several_forks(forks, places):
    for number in range(ROUNDS):
        for _ in range(4):
            sim.add_document()
        worker = f"worker {number}"
        taken = at_once(*[lambda worker=worker: try_claim(worker=worker, forks=forks)] * 4)
        assert sum(run is not None for run in taken) == places
        sim.execute("DELETE FROM runs")


def test_interactive_runs_may_take_all_forks():
    sim.add_document()
    assert try_claim(forks=2) is not None
    sim.add_document()
    assert try_claim(forks=2) is None
    urgent = sim.add_document(Priority.INTERACTIVE)
    assert claim(forks=2).document_id == urgent
    for _ in range(2):
        sim.add_document(Priority.INTERACTIVE)
    assert [try_claim(worker="other", forks=2) is not None for _ in range(2)] == [True, True]


def test_a_message_delivered_again_during_its_work_claims_nothing():
    first, second = sim.add_document(), sim.add_document()
    run = claim(task="message")
    assert run.document_id == first
    assert try_claim(task="message") is None
    assert claim(worker="other", task="message").document_id == second
    leases.release(run)
    assert claim(task="message").document_id == first


def test_a_run_is_not_claimed_before_its_retry_time():
    sim.add_document()
    run = claim()
    assert leases.release(run, retry_in=3600)
    assert try_claim() is None
    sim.execute("UPDATE runs SET retry_at = now() - interval '1 s'")
    assert claim().epoch == 2
    assert run_row(run.id).retry_at is None


def test_an_outage_blocks_only_ocr_claims():
    sim.ready_run()
    server_state.mark_out("http://ocr", "refused", misconfigured=False)
    assert try_claim(Stage.OCR, server="http://ocr") is None
    sim.add_document()
    assert try_claim(Stage.PREPARE, server="http://ocr") is not None
    assert try_claim(Stage.OCR, server="http://another") is not None


def test_renewing_extends_the_lease():
    sim.add_document()
    run = claim()
    assert leases.renew(run, lease(seconds=1000))
    row = run_row(run.id)
    assert 990 < (row.lease_expires_at - row.held_since).total_seconds() < 1010
    assert expire_all() == 0
    leases.require_valid(run)


def test_an_expired_lease_cannot_be_renewed():
    """Its owner was frozen and has stopped; the run must not wait for another lease."""
    sim.add_document()
    run = claim()
    sim.outlast(run.id)
    assert not leases.renew(run, lease())
    assert expire_all() == 1


def expire_all():
    return leases.release_expired(lease(seconds=0.001))


def test_a_release_counts_neither_as_crash_nor_as_expiry():
    sim.add_document()
    for epoch in range(1, 15):
        run = claim()
        assert run.epoch == epoch
        assert leases.release(run)
    row = run_row(run.id)
    assert (row.state, row.crashes, row.expiries) == ("queued", 0, 0)
    assert (row.lease_worker, row.lease_task, row.lease_expires_at, row.held_since) == (None,) * 4
    assert not leases.release(run)


@pytest.mark.parametrize("stage", Stage)
def test_a_released_run_returns_to_the_stage_of_its_claim(stage):
    sim.add_document() if stage is Stage.PREPARE else sim.ready_run()
    run = claim(stage)
    sim.execute("UPDATE runs SET state = 'finishing'")
    assert leases.release(run)
    assert run_row(run.id).state == stage.waiting


def test_a_release_waits_for_a_renewal_in_progress():
    sim.add_document()
    run = claim()
    released = []
    thread = threading.Thread(target=lambda: released.append(leases.release(run)))
    with begin() as connection:
        leases.fence(connection, run, epoch=run.epoch)
        thread.start()
        sim.wait_until_blocked()
    thread.join()
    assert released == [True]
    assert run_row(run.id).state == RunState.QUEUED


def test_a_crash_is_counted_although_the_childs_transaction_is_still_open():
    sim.add_document()
    run = claim(task="t")
    counted = []
    thread = threading.Thread(
        target=lambda: counted.append(leases.release_crashed("worker", "t", lease()))
    )
    with begin() as connection:
        leases.fence(connection, run, epoch=run.epoch)
        thread.start()
        sim.wait_until_blocked()
    thread.join()
    assert counted == [run.id]
    assert run_row(run.id).crashes == 1


def test_a_lease_does_not_expire_while_its_owner_writes_to_the_row():
    sim.add_document()
    run = claim()
    sim.outlast(run.id)
    with begin() as connection:
        leases.fence(connection, run, epoch=run.epoch)
        assert expire_all() == 0
    assert expire_all() == 1


def test_an_owner_frozen_inside_a_transaction_loses_its_run(environment):
    environment(RAG_SERVICE_LEASE_RENEW_EVERY="0.2")
    sim.add_document()
    run = claim()
    sim.outlast(run.id)
    with get_engine().connect() as frozen:
        leases.fence(frozen, run, epoch=run.epoch)
        assert expire_all() == 0
        while expire_all() == 0:
            sim.execute("SELECT pg_sleep(0.05)")
        with pytest.raises(DatabaseError) as lost:
            frozen.execute(text("SELECT 1"))
    assert is_outage(lost.value)
    assert run_row(run.id).state == RunState.QUEUED


def test_a_stopping_worker_releases_its_own_runs_only():
    sim.add_document()
    sim.add_document()
    own, other = claim(worker="a"), claim(worker="b")
    assert leases.release_worker("a") == 1
    assert run_row(own.id).state == RunState.QUEUED
    assert leases.is_valid(other)


def test_the_run_of_a_lost_child_is_released_at_once():
    for _ in range(3):
        sim.add_document()
    lost = claim(worker="a", task="1")
    others = [claim(worker="a", task="2"), claim(worker="b", task="1")]
    assert leases.release_crashed("a", "1", lease())
    row = run_row(lost.id)
    assert (row.state, row.crashes, row.lease_worker) == ("queued", 1, None)
    assert all(leases.is_valid(run) for run in others)
    assert not leases.release_crashed("a", "1", lease())


def seconds_until(moment):
    return float(sim.one("SELECT extract(epoch FROM :at - clock_timestamp()) s", at=moment).s)


def test_trouble_of_its_process_delays_a_run_and_fails_it_only_at_the_limit_of_expiries():
    sim.add_document()
    waits = []
    for number in range(3):
        run = claim(task=f"t{number}")
        assert leases.release_crashed(
            "worker", f"t{number}", lease(expiry_limit=3), Blame.TROUBLE, "no memory"
        )
        row = run_row(run.id)
        if row.retry_at is not None:
            waits.append(round(seconds_until(row.retry_at)))
            sim.execute("UPDATE runs SET retry_at = NULL")
    assert (row.crashes, row.expiries, row.state) == (0, 3, "failed")
    assert waits == [1, 2]
    assert row.error_code == "worker_crashed"
    assert row.error_message.endswith("the last time: no memory)")


def test_a_process_that_cannot_work_at_all_costs_the_run_nothing():
    sim.add_document()
    run = claim(task="t")
    assert leases.release_crashed("worker", "t", lease(), Blame.NONE) == run.id
    row = run_row(run.id)
    assert (row.crashes, row.expiries, row.state, row.retry_at) == (0, 0, "queued", None)


def crash(run, task):
    leases.release_crashed("worker", task, lease())
    return run_row(run.id)


def test_the_third_crash_fails_the_run_and_names_the_pages_in_progress():
    run = sim.ready_run(PageState.PENDING, PageState.PENDING)
    for number in range(3):
        held = claim(Stage.OCR, task=f"t{number}")
        run_pages.mark_in_progress(held, 3)
        run_pages.mark_in_progress(held, 2)
        row = crash(run, f"t{number}")
        assert row.crashes == number + 1
    assert (row.state, row.error_code, row.error_retryable) == ("failed", "worker_crashed", False)
    assert "pages in progress: 2, 3" in row.error_message
    assert "lost children: 3" in row.error_message
    assert sim.document_row(run.document_id).current_run_id == run.id


def test_pages_of_an_earlier_claim_are_not_named():
    run = sim.ready_run(PageState.PENDING)
    run_pages.mark_in_progress(claim(Stage.OCR, task="t0"), 1)
    crash(run, "t0")
    run_pages.mark_in_progress(claim(Stage.OCR, task="t1"), 1)
    crash(run, "t1")
    run_pages.mark_in_progress(claim(Stage.OCR, task="t2"), 2)
    assert "pages in progress: 2)" in crash(run, "t2").error_message


def test_ten_expired_leases_fail_the_run():
    sim.add_document()
    for number in range(10):
        run = claim()
        assert expire(run.id) == 1
        row = run_row(run.id)
        assert row.expiries == number + 1
    assert (row.state, row.error_code) == ("failed", "worker_crashed")
    assert "no page in progress" in row.error_message


def test_a_quarantined_run_is_not_claimed_again():
    sim.add_document()
    for number in range(3):
        run = claim(task=str(number))
        crash(run, str(number))
    assert try_claim() is None
    assert run_row(run.id).state == RunState.FAILED


@pytest.mark.parametrize("progress", ["page", "plan", "reuse"])
def test_progress_resets_the_counts(progress):
    document_id = sim.processed_document(PageState.NATIVE)
    sim.add_run(document_id)
    run = claim()
    sim.plan(run, PageState.PENDING) if progress == "page" else None
    sim.execute("UPDATE runs SET crashes = 2, expiries = 9 WHERE id = :id", id=run.id)
    if progress == "page":
        sim.read(run, 1)
    elif progress == "plan":
        run_pages.store_plan(run, [sim.planned(2, PageState.PENDING)])
    else:
        assert run_pages.reuse(run) == 1
    row = run_row(run.id)
    assert (row.crashes, row.expiries) == (0, 0)


def test_a_reuse_without_any_page_is_no_progress():
    """A document that crashes its worker at every start must not be tried forever."""
    document_id = sim.processed_document(PageState.NATIVE)
    sim.add_run(document_id)
    for number in range(3):
        run = claim(task=str(number))
        run_pages.reuse(run)
        row = crash(run, str(number))
    assert row.state == RunState.FAILED, "the crashes were reset"


def test_a_later_try_is_no_progress():
    run = sim.ready_run()
    held = claim(Stage.OCR)
    sim.execute("UPDATE runs SET crashes = 2")
    sim.read(held, 1, retry_in=60)
    assert run_row(run.id).crashes == 2


def test_no_lease_expires_soon_after_the_start_of_postgresql():
    sim.add_document()
    run = claim()
    sim.outlast(run.id)
    assert leases.release_expired(lease(seconds=10 * 365 * 86400)) == 0
    assert leases.is_valid(run)
    assert expire_all() == 1


def test_the_seconds_that_forks_hold_a_run_add_up():
    sim.add_document()
    run = claim()
    sim.execute("UPDATE runs SET held_since = now() - interval '100 s'")
    sim.plan(run, PageState.PENDING)
    runs.hand_to_ocr(run)
    sim.execute("UPDATE runs SET ready_at = now() - interval '1 h'")
    held = claim(Stage.OCR)
    assert 100 <= held.worked_seconds < 160
    sim.execute("UPDATE runs SET held_since = now() - interval '1000 s'")
    leases.release(held)
    assert 1100 <= run_row(run.id).worked_seconds < 1160


WRITES = {
    "store_preflight": lambda run: runs.store_preflight(run, 9, []),
    "store_plan": lambda run: run_pages.store_plan(run, [sim.planned(7, PageState.NATIVE)]),
    "store_plan without pages": lambda run: run_pages.store_plan(run, []),
    "reuse": run_pages.reuse,
    "hand_to_ocr": runs.hand_to_ocr,
    "hand_to_ocr with pages": lambda run: runs.hand_to_ocr(
        run, [sim.planned(7, PageState.PENDING)]
    ),
    "mark_in_progress": lambda run: run_pages.mark_in_progress(run, 1),
    "store": lambda run: sim.read(run, 1),
    "store for later": lambda run: sim.read(run, 1, retry_in=5),
    "finish": runs.finish,
    "finish with pages": lambda run: runs.finish(run, [sim.planned(7, PageState.NATIVE)]),
    "fail": lambda run: runs.fail(run, Internal()),
    "require_valid": leases.require_valid,
}
QUIET_WRITES = {
    "renew": lambda run: leases.renew(run, lease()),
    "release": leases.release,
    "is_valid": leases.is_valid,
}


def lose_to_another(run):
    expire(run.id)
    assert claim(Stage.OCR, worker="other").epoch == run.epoch + 1


def lose_to_expiry(run):
    expire(run.id)


def lose_to_a_cancel(run):
    with begin() as connection:
        assert runs.cancel(connection, run.document_id, Internal())


def lose_to_a_removal(run):
    with begin() as connection:
        document_rows.remove(connection, run.document_id)


@pytest.mark.parametrize(
    "lose", [lose_to_another, lose_to_expiry, lose_to_a_cancel, lose_to_a_removal]
)
def test_a_write_under_a_lost_lease_changes_nothing(lose):
    sim.ready_run(PageState.PENDING)
    run = claim(Stage.OCR)
    lose(run)
    before = everything()
    for name, write in WRITES.items():
        with pytest.raises(LeaseLost):
            write(run)
        assert everything() == before, name
    for name, write in QUIET_WRITES.items():
        assert not write(run), name
        assert everything() == before, name


def test_a_write_that_waited_for_the_row_notices_the_lost_lease():
    """The write begins while its lease is valid and gets the row after the release."""
    run = sim.ready_run()
    held = claim(Stage.OCR)
    results = []

    def write():
        try:
            sim.read(held, 1)
        except LeaseLost as error:
            results.append(error)

    thread = threading.Thread(target=write)
    with begin() as connection:
        leases.fence(connection, held, epoch=held.epoch + 1)
        thread.start()
        sim.wait_until_blocked()
    thread.join()
    assert len(results) == 1
    assert sim.page_row(run.id, 1).state == PageState.PENDING


def test_concurrent_releases_release_the_run_exactly_once():
    sim.add_document()
    patient = lease(seconds=0.001, crash_limit=1000, expiry_limit=1000)
    for _ in range(ROUNDS):
        task = uuid.uuid4().hex
        run = claim(task=task)
        sim.outlast(run.id)
        outcomes = at_once(
            lambda run=run: leases.release(run),
            lambda task=task: leases.release_crashed("worker", task, patient),
            lambda: leases.release_expired(patient),
            lambda: leases.release_worker("worker"),
        )
        assert sorted(int(bool(one)) for one in outcomes) == [0, 0, 0, 1], outcomes
        assert run_row(run.id).state == RunState.QUEUED
