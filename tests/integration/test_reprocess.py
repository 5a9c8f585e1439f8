"""Redoing documents: what would be done, what is done, what is passed by."""

import pytest

from rag_service import lifecycle
from rag_service import reprocess as redoing
from rag_service.broker import queue_length
from rag_service.errors import EncryptedPdf, InvalidOptions, NotFound, WorkerCrashed
from rag_service.knowledgebase import pages, runs
from rag_service.knowledgebase.selection import Selectors
from rag_service.reprocess import Change, check_change
from rag_service.states import PageState, Priority, RunState, Stage
from tests import simulation as sim
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
    assert pages.reuse(run) == 2
    assert queue_length(Stage.PREPARE) == 1


def test_a_dry_run_says_the_same_and_does_nothing(redo, failed):
    before = sim.everything()
    [said] = redo(failed=True, dry_run=True)
    assert (said.action, said.run_id, said.pages_redone) == ("would_queue", None, 1)
    assert sim.everything() == before
    assert queue_length(Stage.PREPARE) == 0


def test_all_pages_takes_nothing_over(redo, failed):
    [done] = redo(failed, change=Change(all_pages=True))
    assert (done.pages_reused, done.pages_redone) == (0, 3)
    assert not claim().reuse_pages


def test_what_is_whole_already_is_not_redone(redo):
    document_id = sim.processed_document(GOOD, GOOD)
    [said] = redo(document_id)
    assert (said.action, said.run_id) == ("nothing_to_redo", None)
    assert newest_run(document_id).number == 1
    [done] = redo(document_id, change=Change(all_pages=True))
    assert done.action == "queued"


@pytest.mark.parametrize("state", ["cancelled", "failed"])
def test_what_ended_otherwise_is_redone_although_its_pages_are_good(redo, state):
    document_id = sim.processed_document(GOOD)
    sim.execute("UPDATE runs SET state = :state", state=state)
    [done] = redo(document_id)
    assert (done.action, done.pages_reused) == ("queued", 1)


def test_other_options_make_a_run_that_reads_all(redo):
    document_id = sim.processed_document(GOOD, GOOD)
    [done] = redo(document_id, change=Change(ocr="force", priority=Priority.INTERACTIVE))
    assert (done.action, done.pages_reused, done.pages_redone) == ("queued", 0, 2)
    row = newest_run(document_id)
    assert (row.ocr, row.priority, row.parser) == ("force", Priority.INTERACTIVE, "glmocr")


def test_another_model_in_the_settings_is_another_reading(redo, environment, settings):
    document_id = sim.processed_document(GOOD)
    environment(GLMOCR_MODEL="glm-ocr-next")
    changed = settings.model_copy(
        update={"ocr": settings.ocr.model_copy(update={"model": "glm-ocr-next"})}
    )
    [done] = redoing.reprocess(changed, Selectors(ids=(document_id,)), Change())
    assert (done.action, done.pages_reused) == ("queued", 0)


def test_the_documents_own_choice_is_kept(redo):
    document_id = sim.processed_document(FAILED, options=sim.OTHER_OPTIONS)
    redo(document_id)
    assert newest_run(document_id).ocr == "force"


def test_active_documents_are_passed_by_and_counted(redo, failed):
    sim.add_run(failed)
    [done] = redo(failed)
    assert done.action == "skipped_active"
    assert newest_run(failed).number == 2


def test_documents_that_kill_workers_are_redone_by_id_only(redo):
    document_id = sim.add_document()
    runs.fail(claim(), WorkerCrashed())
    assert redo(failed=True) == redo(error="worker_crashed") == redo(collection="default") == []
    assert redo(document_id)[0].action == "queued"


def test_many_are_redone_by_their_code_in_order(redo):
    ids = [sim.add_document() for _ in range(3)]
    for _ in ids:
        runs.fail(claim(), EncryptedPdf())
    assert [done.id for done in redo(error="encrypted_pdf")] == ids
    assert redo(error="encrypted_pdf") == []
    assert redo(failed=True) == []


def test_each_is_reported_as_it_is_done(settings, failed):
    told = []
    done = redoing.reprocess(settings, Selectors(failed=True), Change(), on_each=told.append)
    assert told == done


def test_what_is_not_there_is_named_and_nothing_is_done(redo, failed):
    with pytest.raises(NotFound, match="no-such"):
        redo(failed, "no-such")
    assert newest_run(failed).number == 1
    with pytest.raises(InvalidOptions, match="which documents"):
        redo()


def test_a_document_that_is_deleted_meanwhile_stops_nobody(redo, failed, monkeypatch):
    other = sim.processed_document(FAILED)
    select = redoing.select_documents

    def then_delete(*args):
        found = select(*args)
        lifecycle.delete(failed)
        return found

    monkeypatch.setattr(redoing, "select_documents", then_delete)
    done = redo(failed=True)
    assert [(one.id, one.action) for one in done] == [
        (failed, "nothing_to_redo"),
        (other, "queued"),
    ]


def test_two_that_redo_at_once_make_one_run(redo, failed):
    for number in range(2, 12):
        outcomes = at_once(*[lambda: redo(failed)[0].action] * 4)
        assert sorted(outcomes) == ["queued"] + ["skipped_active"] * 3
        assert newest_run(failed).number == number
        lifecycle.cancel(failed)


def test_the_old_text_answers_until_the_new_run_has_ended(redo):
    document_id = sim.processed_document(GOOD)
    old = newest_run(document_id).id
    redo(document_id, change=Change(ocr="force"))
    assert sim.document_row(document_id).current_run_id == old
    run = claim()
    sim.plan(run, GOOD)
    assert runs.finish(run) is RunState.PROCESSED
    assert sim.document_row(document_id).current_run_id == run.id


@pytest.mark.parametrize("wishes", [{"parser": "none"}, {"ocr": "maybe"}])
def test_changes_that_mean_nothing_are_named(settings, wishes):
    with pytest.raises(InvalidOptions, match=next(iter(wishes))):
        check_change(**{"parser": None, "ocr": None, "all_pages": False, **wishes})
