"""Reprocessing: what a dry run reports, what is done, what is skipped."""

from datetime import UTC, datetime

import pytest

from rag_service.documents import deletion
from rag_service.documents import reprocess as redoing
from rag_service.documents.reprocess import Change, check_change
from rag_service.errors import EncryptedPdf, InvalidOptions, NotFound, WorkerCrashed
from rag_service.jobs import run_pages, runs
from rag_service.jobs.wake_ups import queue_length
from rag_service.knowledgebase.selection import Selectors
from rag_service.states import PageState, Priority, RunState, Stage
from tests import simulation as sim
from tests.conftest import changed_settings
from tests.simulation import at_once, claim, newest_run

GOOD, FAILED = PageState.NATIVE, PageState.FAILED


@pytest.fixture
def redo(settings):
    def act(*ids, change=None, dry_run=False, **selectors):
        chosen = Selectors(ids=ids, **selectors)
        return redoing.reprocess(settings, chosen, change or Change(), dry_run=dry_run)

    return act


@pytest.fixture
def failed(settings):
    """A document with two good pages and a failed one."""
    return sim.processed_document(GOOD, GOOD, FAILED)


def test_the_failed_pages_alone_are_read_again(redo, failed):
    [done] = redo(failed=True)
    assert (done.id, done.action, done.pages_reused, done.pages_redone) == (failed, "queued", 2, 1)
    assert newest_run(failed).id == done.run_id
    run = claim()
    assert run.reuse_pages
    assert run_pages.reuse(run) == 2
    assert queue_length(Stage.PREPARE) == 1


def test_a_dry_run_reports_the_same_and_does_nothing(redo, failed):
    before = sim.everything()
    [reported] = redo(failed=True, dry_run=True)
    assert (reported.action, reported.run_id, reported.pages_redone) == ("would_queue", None, 1)
    assert sim.everything() == before
    assert queue_length(Stage.PREPARE) == 0


def test_all_pages_reuses_nothing(redo, failed):
    [done] = redo(failed, change=Change(all_pages=True))
    assert (done.pages_reused, done.pages_redone) == (0, 3)
    assert not claim().reuse_pages


def test_a_complete_document_is_not_redone(redo):
    document_id = sim.processed_document(GOOD, GOOD)
    [reported] = redo(document_id)
    assert (reported.action, reported.run_id) == ("nothing_to_redo", None)
    assert newest_run(document_id).number == 1
    [done] = redo(document_id, change=Change(all_pages=True))
    assert done.action == "queued"


@pytest.mark.parametrize("state", ["cancelled", "failed"])
def test_a_cancelled_or_failed_run_is_redone_although_its_pages_are_good(redo, state):
    document_id = sim.processed_document(GOOD)
    sim.execute("UPDATE runs SET state = :state", state=state)
    [done] = redo(document_id)
    assert (done.action, done.pages_reused) == ("queued", 1)


def test_a_run_with_other_options_reads_all_pages(redo):
    document_id = sim.processed_document(GOOD, GOOD)
    [done] = redo(document_id, change=Change(ocr="force", priority=Priority.INTERACTIVE))
    assert (done.action, done.pages_reused, done.pages_redone) == ("queued", 0, 2)
    row = newest_run(document_id)
    assert (row.ocr, row.priority, row.parser) == ("force", Priority.INTERACTIVE, "glmocr")


def test_a_new_model_in_the_settings_reuses_no_page(redo, environment, settings):
    document_id = sim.processed_document(GOOD)
    environment(GLMOCR_MODEL="glm-ocr-next")
    changed = settings.model_copy(
        update={"ocr": settings.ocr.model_copy(update={"model": "glm-ocr-next"})}
    )
    [done] = redoing.reprocess(changed, Selectors(ids=(document_id,)), Change())
    assert (done.action, done.pages_reused) == ("queued", 0)


def test_the_documents_own_options_are_kept(redo):
    document_id = sim.processed_document(FAILED, options=sim.OTHER_OPTIONS)
    redo(document_id)
    assert newest_run(document_id).ocr == "force"


def test_active_documents_are_skipped_and_reported(redo, failed):
    sim.add_run(failed)
    [done] = redo(failed)
    assert done.action == "skipped_active"
    assert newest_run(failed).number == 2


def test_documents_that_crash_workers_are_redone_by_id_only(redo):
    document_id = sim.add_document()
    runs.fail(claim(), WorkerCrashed())
    assert redo(failed=True) == redo(error="worker_crashed") == redo(collection="default") == []
    assert redo(document_id)[0].action == "queued"


def test_documents_with_an_error_code_are_redone_in_order(redo):
    ids = [sim.add_document() for _ in range(3)]
    for _ in ids:
        runs.fail(claim(), EncryptedPdf())
    assert [done.id for done in redo(error="encrypted_pdf")] == ids
    assert redo(error="encrypted_pdf") == []
    assert redo(failed=True) == []


def test_unknown_ids_are_named_and_nothing_is_done(redo, failed):
    with pytest.raises(NotFound, match="no-such"):
        redo(failed, "no-such")
    assert newest_run(failed).number == 1
    with pytest.raises(InvalidOptions, match="No documents selected"):
        redo()


def test_a_document_deleted_meanwhile_does_not_stop_the_others(redo, failed, monkeypatch):
    other = sim.processed_document(FAILED)
    select = redoing.select_documents

    def then_delete(*args, **more):
        found = select(*args, **more)
        deletion.delete(failed)
        return found

    monkeypatch.setattr(redoing, "select_documents", then_delete)
    done = redo(failed=True)
    assert [(one.id, one.action) for one in done] == [
        (failed, "nothing_to_redo"),
        (other, "queued"),
    ]


def test_concurrent_reprocesses_add_one_run(redo, failed):
    for number in range(2, 12):
        outcomes = at_once(*[lambda: redo(failed)[0].action] * 4)
        assert sorted(outcomes) == ["queued"] + ["skipped_active"] * 3
        assert newest_run(failed).number == number
        deletion.cancel(failed)


def test_the_old_run_stays_current_until_the_new_one_has_ended(redo):
    document_id = sim.processed_document(GOOD)
    old = newest_run(document_id).id
    redo(document_id, change=Change(ocr="force"))
    assert sim.document_row(document_id).current_run_id == old
    run = claim()
    sim.plan(run, GOOD)
    assert runs.finish(run) is RunState.PROCESSED
    assert sim.document_row(document_id).current_run_id == run.id


@pytest.mark.parametrize(
    "wishes",
    [
        {"parser": "none"},
        {"ocr": "maybe"},
        {"pages": "1", "all_pages": True},
        *({"pages": text} for text in ("0", "3,", ",", "7-", "-7", "9-7", "a", "1.5", "1;2", "²")),
        {"pages": "1" * 30},
    ],
)
def test_invalid_changes_are_named(settings, wishes):
    with pytest.raises(InvalidOptions, match=next(iter(wishes))):
        check_change(**wishes)


def test_pages_are_numbers_and_ranges():
    assert check_change(pages="3, 7-9 ,1").pages == ((3, 3), (7, 9), (1, 1))
    assert check_change(pages="").pages == check_change().pages == ()


def test_since_must_be_earlier_than_before(redo):
    now = datetime.now(UTC)
    with pytest.raises(InvalidOptions, match="since"):
        redo(since=now, before=now)


def truncated_document():
    """A document with three pages: native, read completely, truncated."""
    document_id = sim.add_document()
    run = claim()
    sim.plan(run, GOOD, PageState.PENDING, PageState.PENDING)
    sim.read(run, 2, columns={"model": "glm-ocr", "dpi": 150.0})
    sim.read(run, 3, PageState.TRUNCATED, columns={"model": "glm-ocr", "dpi": 150.0})
    runs.finish(run)
    return document_id


def redone_pages(done):
    """Return the pages that the new run has to read after its reuse."""
    run = claim()
    assert run.id == done.run_id
    assert run_pages.reuse(run) == done.pages_reused
    return {1, 2, 3} - sim.planned_numbers(run)


@pytest.mark.parametrize("model", ["glm-ocr", "glm-ocr-next"])
@pytest.mark.parametrize(
    ("selectors", "numbers", "expected"),
    [
        ({"truncated": True}, None, {3}),
        ({"model_was": "glm-ocr"}, None, {2, 3}),
        ({"dpi_was": 150}, "1-2", {2}),
        ({"collection": "default"}, "1,3", {1, 3}),
        ({"collection": "default"}, "2-100", {2, 3}),
    ],
)
def test_only_selected_pages_are_read_again(settings, selectors, numbers, expected, model):
    """Although they are good, and although the others were read by an earlier model."""
    document_id = truncated_document()
    today = changed_settings(settings, ocr={"model": model})
    change = check_change(pages=numbers)
    reported = redoing.reprocess(today, Selectors(**selectors), change, dry_run=True)
    [done] = redoing.reprocess(today, Selectors(**selectors), change)
    assert [(one.id, one.pages_redone) for one in reported] == [(document_id, len(expected))]
    assert (done.action, done.pages_redone) == ("queued", len(expected))
    assert redone_pages(done) == expected


def test_failed_pages_are_read_again_with_the_selected_ones(redo, failed):
    [done] = redo(failed, change=check_change(pages="1"))
    assert (done.pages_reused, done.pages_redone) == (1, 2)
    assert redone_pages(done) == {1, 3}


def test_missing_page_numbers_are_reported(redo, failed):
    before = sim.everything()
    [reported] = redo(failed, change=check_change(pages="4-9"))
    assert (reported.action, reported.run_id) == ("no_such_page", None)
    assert (reported.pages_reused, reported.pages_redone) == (3, 0)
    assert sim.everything() == before


def test_all_pages_of_documents_selected_by_their_pages(redo):
    truncated_document()
    sim.processed_document(GOOD)
    [done] = redo(truncated=True, change=check_change(all_pages=True))
    assert (done.pages_reused, done.pages_redone) == (0, 3)
    run = claim()
    assert (run.reuse_pages, run.redo_pages) == (False, ())


def test_an_active_document_is_skipped_for_any_pages(redo):
    document_id = sim.add_document()
    [reported] = redo(document_id, change=check_change(pages="1"))
    assert reported.action == "skipped_active"
