"""A run that gives way waits behind others; stages that documents hold are named."""

from __future__ import annotations

import pytest

from rag_service.config.loader import get_settings
from rag_service.database.engine import begin
from rag_service.jobs import held_stages, leases, live_workers, run_pages, runs
from rag_service.knowledgebase import document_queries
from rag_service.knowledgebase.summary_queries import summarise
from rag_service.monitoring import readiness
from rag_service.runtime.time_spent import TimeSpent
from rag_service.states import PageState, Priority, Stage
from tests import simulation as sim

pytestmark = pytest.mark.usefixtures("settings")
AFTER = 300.0


def age(run, seconds: float, column: str = "held_since") -> None:
    sim.execute(
        f"UPDATE runs SET {column} = now() - interval '{seconds} seconds' WHERE id = '{run.id}'"
    )


def test_a_run_that_gave_way_comes_after_all_that_wait_and_keeps_its_pages() -> None:
    slow = sim.add_document()
    run = sim.claim()
    sim.plan(run, PageState.NATIVE)
    later = [sim.add_document() for _ in range(2)]
    assert leases.others_wait(Stage.PREPARE, run)
    assert leases.give_way(run)
    assert [sim.claim().document_id for _ in range(3)] == [*later, slow]
    assert sim.try_claim() is None


def test_the_more_it_was_worked_on_the_more_come_before_it_but_not_for_ever() -> None:
    sim.add_document()
    run = sim.claim()
    age(run, 60)
    assert leases.give_way(run)
    soon = sim.add_document()
    assert sim.claim().document_id == soon
    sim.execute(f"UPDATE runs SET queued_at = now() + interval '3 hours' WHERE id <> '{run.id}'")
    sim.add_document()
    sim.execute(
        "UPDATE runs SET queued_at = now() + interval '3601 seconds' WHERE state = 'queued'"
        f" AND id <> '{run.id}'"
    )
    assert sim.claim().id == run.id


def test_nothing_is_charged_to_it_and_a_lost_lease_changes_nothing() -> None:
    sim.add_document()
    run = sim.claim()
    assert leases.give_way(run)
    assert not leases.give_way(run)
    again = sim.claim()
    assert again.id == run.id
    with begin() as connection:
        counts = connection.exec_driver_sql("SELECT crashes, expiries, epoch FROM runs").one()
    assert tuple(counts) == (0, 0, again.epoch)


@pytest.mark.parametrize(
    ("own", "other", "gives"),
    [
        (Priority.BULK, Priority.BULK, True),
        (Priority.BULK, Priority.INTERACTIVE, True),
        (Priority.INTERACTIVE, Priority.BULK, False),
    ],
)
def test_it_gives_way_to_runs_that_are_no_less_urgent(own, other, gives) -> None:
    sim.add_document(own)
    run = sim.claim()
    assert not leases.others_wait(Stage.PREPARE, run)
    sim.add_document(other)
    assert leases.others_wait(Stage.PREPARE, run) is gives


def test_the_time_spent_counts_on_in_the_next_turn_and_from_zero_at_the_next_stage() -> None:
    sim.add_document()
    run = sim.claim()
    assert run.spent == TimeSpent()
    spent = TimeSpent(12.5, 2, 1)
    run_pages.store_plan(run, [sim.planned(1, PageState.PENDING)], spent)
    leases.give_way(run)
    again = sim.claim()
    assert again.spent == spent
    runs.hand_to_ocr(again)
    assert sim.claim(Stage.OCR).spent == TimeSpent()


def test_the_place_in_the_queue_is_shown_after_it_gave_way() -> None:
    slow = sim.add_document()
    run = sim.claim()
    other = sim.add_document()
    leases.give_way(run)

    def place(document_id: str) -> int | None:
        view = document_queries.get_document(document_id, None)
        assert view is not None
        return view.queue_position

    live_workers.heartbeat("prepare@a:1:x", Stage.PREPARE, 2)
    assert (place(other), place(slow)) == (1, 2)


def held(stage: Stage = Stage.PREPARE):
    return next((one for one in held_stages.held_stages(AFTER, None) if one.stage is stage), None)


def test_a_stage_is_held_when_no_fork_is_left_for_minutes_and_documents_wait() -> None:
    worker = "prepare@a:1:x"
    live_workers.heartbeat(worker, Stage.PREPARE, 3)
    for _ in range(3):
        sim.add_document()
    first, second = (sim.claim(worker=worker, forks=3) for _ in range(2))
    age(first, 400)
    assert held() is None, "a fork was taken just now"
    age(second, 350)
    found = held()
    assert found is not None
    assert found.waiting == 1
    assert [one.document_id for one in found.holders] == [first.document_id, second.document_id]
    assert 350 <= found.seconds < 360
    assert first.document_id[:8] in found.message
    assert "while 1 document waits" in found.message
    settings = get_settings()
    assert [one.stage for one in summarise(settings).held] == [Stage.PREPARE]
    faults = {one.name: one.message for one in readiness.held_faults(settings)}
    assert faults == {"prepare_held": found.message}
    leases.give_way(second)
    assert held() is None


def test_a_stage_without_waiting_documents_is_not_held() -> None:
    worker = "prepare@a:1:x"
    live_workers.heartbeat(worker, Stage.PREPARE, 1)
    sim.add_document()
    age(sim.claim(worker=worker, forks=1), 900)
    assert held() is None


def test_an_ocr_fork_that_stores_pages_is_not_held() -> None:
    worker = "ocr@a:1:x"
    live_workers.heartbeat(worker, Stage.OCR, 1)
    for _ in range(2):
        sim.add_document()
    for _ in range(2):
        run = sim.claim()
        sim.plan(run, PageState.PENDING, PageState.PENDING)
        runs.hand_to_ocr(run)
    reading = sim.claim(Stage.OCR, worker, forks=1)
    age(reading, 900)
    age(reading, 900, "progress_at")
    assert held(Stage.OCR) is not None
    sim.read(reading, 1, PageState.OCR)
    assert held(Stage.OCR) is None
