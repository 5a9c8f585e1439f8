"""Wake-up messages wanted, live workers, and the maintenance lease."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_service.jobs import leases, live_workers
from rag_service.jobs.live_workers import LiveWorker, wake_ups_wanted
from rag_service.states import PageState, Priority, Stage
from tests import simulation as sim
from tests.simulation import at_once, claim, try_claim


@st.composite
def live_worker(draw):
    forks = draw(st.integers(1, 5))
    busy = draw(st.integers(0, forks))
    bulk = draw(st.integers(0, min(busy, max(1, forks - 1))))
    return LiveWorker("w", Stage.OCR, forks, busy, bulk)


@given(st.lists(live_worker(), max_size=4), st.integers(0, 12), st.integers(0, 12))
def test_as_many_messages_are_wanted_as_free_forks_can_claim_runs(workers, interactive, bulk):
    """Compared with a count fork by fork, in the order of claims."""
    waiting = {"interactive": interactive, "bulk": bulk}
    taken = 0
    for worker in workers:
        held = worker.bulk
        for _ in range(worker.forks - worker.busy):
            # The order does not change the count: an unused bulk place stays free for bulk.
            if waiting["bulk"] and held < max(1, worker.forks - 1):
                waiting["bulk"], held, taken = waiting["bulk"] - 1, held + 1, taken + 1
            elif waiting["interactive"]:
                waiting["interactive"], taken = waiting["interactive"] - 1, taken + 1
    assert wake_ups_wanted(workers, interactive, bulk) >= taken
    free = sum(worker.forks - worker.busy for worker in workers)
    assert wake_ups_wanted(workers, interactive, bulk) <= min(free, interactive + bulk)


@pytest.mark.parametrize(
    ("forks", "busy", "bulk", "interactive", "waiting", "wanted"),
    [
        (8, 0, 0, 0, 100, 7),
        (8, 0, 0, 1, 100, 8),
        (8, 7, 7, 0, 100, 0),
        (8, 7, 7, 5, 100, 1),
        (8, 8, 7, 5, 100, 0),
        (1, 0, 0, 0, 3, 1),
        (2, 1, 0, 0, 3, 1),
        (2, 1, 1, 0, 3, 0),
        (8, 0, 0, 0, 0, 0),
    ],
)
def test_the_reserved_fork_is_not_counted_for_bulk(forks, busy, bulk, interactive, waiting, wanted):
    worker = LiveWorker("w", Stage.OCR, forks, busy, bulk)
    assert wake_ups_wanted([worker], interactive, waiting) == wanted


def test_the_number_of_messages_wanted_equals_the_number_of_claims(settings):
    for number in range(5):
        live_workers.heartbeat("worker", Stage.PREPARE, 4)
        sim.add_document(Priority.INTERACTIVE if number == 4 else Priority.BULK)
    wanted = wake_ups_wanted(
        live_workers.of_stage(Stage.PREPARE), *live_workers.claimable_counts(Stage.PREPARE, None, 4)
    )
    claims = [try_claim(forks=4) for _ in range(6)]
    assert wanted == sum(run is not None for run in claims) == 4
    [worker] = live_workers.of_stage(Stage.PREPARE)
    assert (worker.busy, worker.bulk, worker.free, worker.free_for_bulk) == (4, 3, 0, 0)


def test_runs_that_may_not_be_claimed_yet_are_not_counted(settings):
    sim.ready_run()
    sim.add_document()
    sim.add_document(Priority.INTERACTIVE)
    assert live_workers.claimable_counts(Stage.PREPARE, None, 9) == (1, 1)
    assert live_workers.claimable_counts(Stage.OCR, None, 9) == (0, 1)
    assert live_workers.claimable_counts(Stage.PREPARE, None, 1) == (1, 0), "the first in order"
    leases.release(claim(), retry_in=60)
    assert live_workers.claimable_counts(Stage.PREPARE, None, 9) == (0, 1)


def test_workers_are_alive_while_they_send_heartbeats(settings):
    live_workers.heartbeat("a", Stage.OCR, 2)
    live_workers.heartbeat("b", Stage.OCR, 8)
    live_workers.heartbeat("c", Stage.PREPARE, 2)
    assert [worker.id for worker in live_workers.of_stage(Stage.OCR)] == ["a", "b"]
    sim.execute("UPDATE workers SET seen_at = now() - interval '31 s' WHERE id = 'a'")
    assert [worker.id for worker in live_workers.of_stage(Stage.OCR)] == ["b"]
    live_workers.heartbeat("a", Stage.OCR, 3)
    assert [worker.forks for worker in live_workers.of_stage(Stage.OCR)] == [3, 8]
    live_workers.remove("b")
    assert [worker.id for worker in live_workers.of_stage(Stage.OCR)] == ["a"]


def test_stale_workers_are_removed(settings):
    live_workers.heartbeat("a", Stage.OCR, 2)
    live_workers.heartbeat("b", Stage.OCR, 2)
    sim.execute("UPDATE workers SET seen_at = now() - interval '61 min' WHERE id = 'a'")
    live_workers.remove_stale()
    assert [row.id for row in sim.rows("SELECT id FROM workers")] == ["b"]


def test_only_held_runs_count_as_busy_forks(settings):
    live_workers.heartbeat("worker", Stage.PREPARE, 4)
    sim.processed_document(PageState.NATIVE)
    for _ in range(2):
        sim.add_document()
    leases.release(claim())
    claim()
    claim(worker="other")
    [worker] = live_workers.of_stage(Stage.PREPARE)
    assert (worker.busy, worker.bulk) == (1, 1)


def test_maintenance_has_one_holder_at_a_time(settings):
    first = live_workers.claim_maintenance("a", 30)
    assert (first.holder, first.epoch) == ("a", 1)
    assert live_workers.claim_maintenance("b", 30) is None
    assert live_workers.claim_maintenance("a", 30) == first
    sim.execute("UPDATE maintenance_lease SET expires_at = now() - interval '1 s'")
    second = live_workers.claim_maintenance("b", 30)
    assert second.epoch == 2
    assert live_workers.claim_maintenance("a", 30) is None
    live_workers.release_maintenance(first)
    assert live_workers.claim_maintenance("a", 30) is None, (
        "a stale holder released another's lease"
    )
    live_workers.release_maintenance(second)
    assert live_workers.claim_maintenance("a", 30).epoch == 3
    assert live_workers.maintenance_silence() < 30


def test_concurrent_claims_of_maintenance_get_one_holder(settings):
    for _ in range(20):
        held = at_once(
            *[lambda name=name: live_workers.claim_maintenance(name, 30) for name in "abcd"]
        )
        assert sum(claim is not None for claim in held) == 1
        sim.execute("DELETE FROM maintenance_lease")
