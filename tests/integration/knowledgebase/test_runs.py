"""Runs: added, handed to OCR, ended; and the document's current run."""

from dataclasses import replace

import pytest

from rag_service.database import document_rows
from rag_service.database.engine import begin
from rag_service.errors import (
    AlreadyActive,
    Cancelled,
    DocumentTimeout,
    LeaseLost,
    NotFound,
    OcrRejected,
)
from rag_service.jobs import leases, run_pages, runs
from rag_service.jobs.runs import RunOptions
from rag_service.states import LayoutMode, PageState, Priority, RunState, Stage
from tests import simulation as sim
from tests.simulation import at_once, claim, document_row, newest_run, run_row

pytestmark = pytest.mark.usefixtures("settings")
ROUNDS = 20


def cancel(document_id):
    with begin() as connection:
        return runs.cancel(connection, document_id, Cancelled())


def mark_deleted(document_id):
    with begin() as connection:
        return document_rows.mark_deleted(connection, document_id)


def test_different_options_have_different_fingerprints():
    options = [
        RunOptions("glmocr", "m", "auto", 150, LayoutMode.AUTO),
        RunOptions("other", "m", "auto", 150, LayoutMode.AUTO),
        RunOptions("glmocr", "n", "auto", 150, LayoutMode.AUTO),
        RunOptions("glmocr", "m", "force", 150, LayoutMode.AUTO),
        RunOptions("glmocr", "m", "auto", 200, LayoutMode.AUTO),
        RunOptions("glmocr", "m", "auto", 150, LayoutMode.PAGE),
        RunOptions("glmocr", "m", "auto", 150, LayoutMode.REGIONS),
    ]
    assert len({one.fingerprint for one in options}) == len(options)
    assert options[0].fingerprint == replace(options[0]).fingerprint


def test_handing_to_ocr_releases_the_run_to_the_next_stage():
    run = sim.ready_run(PageState.NATIVE)
    row = run_row(run.id)
    assert (row.state, row.lease_worker, row.held_since) == ("ready", None, None)
    assert row.ready_at is not None
    assert not leases.is_valid(run)


@pytest.mark.parametrize(
    "state", [PageState.NATIVE, PageState.BLANK, PageState.NO_TEXT, PageState.TRUNCATED]
)
def test_a_run_without_failed_pages_is_processed(state):
    document_id = sim.add_document()
    run = claim()
    sim.plan(run, PageState.NATIVE, state)
    assert runs.finish(run) is RunState.PROCESSED
    row = run_row(run.id)
    assert (row.state, row.error_code, row.lease_worker) == ("processed", None, None)
    assert row.finished_at is not None
    assert document_row(document_id).current_run_id == run.id


def test_failed_pages_fail_the_run_and_are_named_with_their_causes():
    sim.add_document()
    run = claim()
    sim.plan(run, PageState.FAILED, PageState.NATIVE, PageState.FAILED, PageState.PENDING)
    sim.read(run, 4, columns={})
    sim.execute("UPDATE pages SET state = 'failed', error_code = 'ocr_empty' WHERE number = 4")
    assert runs.finish(run) is RunState.FAILED
    row = run_row(run.id)
    assert row.error_code == "pages_failed"
    assert "3 of 4 pages could not be read (page 1, 3, 4)" in row.error_message
    assert "2 x page_unrenderable" in row.error_message
    assert "1 x ocr_empty" in row.error_message


def test_the_last_planned_pages_are_stored_when_the_run_ends():
    sim.add_document()
    run = claim()
    sim.plan(run, PageState.NATIVE)
    sim.execute("UPDATE runs SET crashes = 1")
    last = [sim.planned(2, PageState.NATIVE), sim.planned(3, PageState.FAILED)]
    assert runs.finish(run, last) is RunState.FAILED
    row = run_row(run.id)
    assert "1 of 3 pages could not be read (page 3)" in row.error_message
    assert row.crashes == 0


def test_the_last_planned_pages_are_stored_when_the_run_is_handed_to_ocr():
    sim.add_document()
    run = claim()
    sim.plan(run, PageState.NATIVE)
    sim.execute("UPDATE runs SET crashes = 1")
    runs.hand_to_ocr(run, [sim.planned(2, PageState.PENDING)])
    assert run_row(run.id).crashes == 0
    assert [page.number for page in run_pages.pending(claim(Stage.OCR))] == [2]


def test_an_interrupted_finish_is_resumed():
    sim.add_document()
    run = claim()
    sim.plan(run, PageState.NATIVE)
    sim.execute("UPDATE runs SET state = 'finishing'")
    sim.expire(run.id)
    assert runs.finish(claim()) is RunState.PROCESSED


def test_an_error_ends_the_run_and_its_text_is_cleaned():
    sim.add_document()
    run = claim()
    runs.fail(run, DocumentTimeout("nul \x00 surrogate \udc80"))
    row = run_row(run.id)
    assert (row.state, row.error_code) == ("failed", "document_timeout")
    assert row.error_message == "nul   surrogate "
    with pytest.raises(LeaseLost):
        runs.fail(run, OcrRejected())
    assert run_row(run.id) == row


def test_an_ended_run_does_not_change():
    document_id = sim.processed_document(PageState.NATIVE)
    before = newest_run(document_id)
    assert not cancel(document_id)
    assert newest_run(document_id) == before


@pytest.mark.parametrize("stage", Stage)
def test_cancel_ends_a_waiting_and_a_claimed_run(stage):
    for held in (False, True):
        document_id = sim.add_document() if stage is Stage.PREPARE else sim.ready_run().document_id
        run = claim(stage) if held else None
        assert cancel(document_id)
        row = newest_run(document_id)
        assert (row.state, row.error_code) == ("cancelled", "cancelled")
        assert row.lease_worker is None
        assert run is None or not leases.is_valid(run)
        assert document_row(document_id).current_run_id is None


def outcome(action):
    try:
        return action()
    except LeaseLost:
        return False


def test_exactly_one_of_a_cancel_and_a_finish_succeeds():
    winners = set()
    for _ in range(ROUNDS):
        document_id = sim.add_document()
        run = claim()
        sim.plan(run, PageState.NATIVE)
        finished, cancelled = at_once(
            lambda run=run: outcome(lambda: runs.finish(run)),
            lambda document_id=document_id: cancel(document_id),
        )
        assert bool(finished) != bool(cancelled)
        state = run_row(run.id).state
        assert state == (RunState.PROCESSED if finished else RunState.CANCELLED)
        assert (document_row(document_id).current_run_id == run.id) == bool(finished)
        winners.add(state)
    assert winners <= {"processed", "cancelled"}


def test_concurrent_calls_add_one_active_run():
    document_id = sim.processed_document(PageState.NATIVE)
    for number in range(2, ROUNDS):
        outcomes = at_once(*[lambda: sim.add_run(document_id)] * 4)
        made = [one for one in outcomes if isinstance(one, str)]
        assert len(made) == 1
        assert sum(isinstance(one, AlreadyActive) for one in outcomes) == 3
        assert newest_run(document_id).number == number
        cancel(document_id)


def test_a_deleted_document_gets_no_new_run():
    hidden, gone = (sim.processed_document(PageState.NATIVE) for _ in range(2))
    mark_deleted(hidden)
    with begin() as connection:
        document_rows.remove(connection, gone)
    for document_id in (hidden, gone, "unknown"):
        with pytest.raises(NotFound):
            sim.add_run(document_id)
    assert len(sim.rows("SELECT id FROM runs")) == 1


def test_the_options_of_a_run_are_stored():
    document_id = sim.add_document(options=sim.OTHER_OPTIONS)
    row = newest_run(document_id)
    assert (row.parser, row.model, row.ocr, row.dpi) == ("glmocr", "glm-ocr", "force", 150)
    assert (row.fingerprint, row.reuse_pages) == (sim.OTHER_OPTIONS.fingerprint, True)


FAILED, GOOD = PageState.FAILED, PageState.NATIVE


@pytest.mark.parametrize(
    ("history", "current"),
    [
        ([[GOOD]], 1),
        ([[GOOD], [GOOD]], 2),
        ([[GOOD], [FAILED]], 1),
        ([[FAILED], [GOOD]], 2),
        ([[GOOD], [FAILED], [GOOD, FAILED]], 1),
        ([[GOOD, FAILED], [GOOD, GOOD, FAILED], [FAILED]], 2),
        ([[GOOD, FAILED], [GOOD, FAILED]], 2),
        ([["cancelled"]], None),
        ([[GOOD], ["cancelled"]], 1),
        ([["cancelled"], [FAILED]], 2),
        ([[FAILED], [FAILED], ["cancelled"]], 2),
    ],
)
def test_the_current_run_is_the_newest_processed_else_the_best_failed_one(history, current):
    document_id = sim.add_document()
    for number, states in enumerate(history, start=1):
        if number > 1:
            sim.add_run(document_id)
        if states == ["cancelled"]:
            cancel(document_id)
            continue
        run = claim()
        sim.plan(run, *states)
        runs.finish(run)
    chosen = document_row(document_id).current_run_id
    assert (chosen and run_row(chosen).number) == current


def test_the_old_run_is_current_until_the_new_one_has_ended():
    document_id = sim.processed_document(PageState.NATIVE)
    old = document_row(document_id).current_run_id
    new = sim.add_run(document_id)
    run = claim()
    sim.plan(run, PageState.NATIVE)
    assert document_row(document_id).current_run_id == old
    runs.finish(run)
    assert document_row(document_id).current_run_id == new


def test_every_good_state_counts_for_the_current_run():
    document_id = sim.add_document()
    run = claim()
    sim.plan(run, *[PageState.NATIVE, PageState.BLANK, PageState.NO_TEXT, FAILED])
    runs.finish(run)
    sim.add_run(document_id)
    better = claim()
    sim.plan(better, *[PageState.PENDING] * 5)
    for number, state in enumerate(
        [PageState.OCR, PageState.TRUNCATED, PageState.OCR, PageState.OCR, FAILED], start=1
    ):
        sim.read(better, number, state)
    runs.finish(better)
    assert document_row(document_id).current_run_id == better.id


def test_claimable_runs_are_listed_in_claim_order():
    bulk, urgent = sim.add_document(), sim.add_document(Priority.INTERACTIVE)
    targets = runs.next_claimable(Stage.PREPARE, None, 5)
    assert [target.run_id for target in targets] == [newest_run(urgent).id, newest_run(bulk).id]
    assert targets[0].filename == "a.pdf"
    assert len(runs.next_claimable(Stage.PREPARE, None, 1)) == 1
    leases.release(claim(), retry_in=60)
    assert [t.run_id for t in runs.next_claimable(Stage.PREPARE, None, 5)] == [newest_run(bulk).id]
    assert runs.next_claimable(Stage.OCR, None, 5) == []


def test_the_backlog_counts_runs_of_a_priority_that_have_not_ended():
    sim.processed_document(PageState.NATIVE)
    sim.ready_run()
    sim.add_document()
    claim()
    sim.add_document(Priority.INTERACTIVE)
    with begin() as connection:
        assert runs.backlog(connection, 9, Priority.BULK) == 2
        assert runs.backlog(connection, 9, Priority.INTERACTIVE) == 1
        found = runs.backlog(connection, 1, Priority.BULK)
        assert found == 1, "no more than asked for are counted"


def test_preflight_warnings_are_cleaned_and_stored():
    sim.add_document()
    run = claim()
    runs.store_preflight(run, 7, [{"code": "repaired_pdf", "message": "a\x00b\ud800"}])
    row = run_row(run.id)
    assert row.page_count == 7
    assert row.warnings == [{"code": "repaired_pdf", "message": "a b"}]


def test_finish_and_storing_the_last_page_agree():
    run = sim.ready_run()
    held = claim(Stage.OCR)
    sim.read(held, 1)
    assert run_pages.pending(held) == []
    assert runs.finish(held) is RunState.PROCESSED
    assert document_row(run.document_id).current_run_id == run.id
