"""Which documents a bulk redo means."""

import pytest

from rag_service.errors import EncryptedPdf, OcrUnavailable, WorkerCrashed
from rag_service.knowledgebase import runs
from rag_service.knowledgebase.engine import begin
from rag_service.knowledgebase.selection import (
    Selectors,
    good_pages,
    select_documents,
    unknown_ids,
)
from rag_service.states import PageState, RunState
from tests import simulation as sim
from tests.simulation import claim

pytestmark = pytest.mark.usefixtures("settings")


def selected(**selectors):
    with begin() as connection:
        return [one.id for one in select_documents(connection, Selectors(**selectors))]


def failed_document(error, **wishes):
    document_id = sim.add_document(**wishes)
    runs.fail(claim(), error)
    return document_id


def test_empty_selectors_say_so():
    assert Selectors().empty
    assert not any(
        s.empty
        for s in (
            Selectors(ids=("a",)),
            Selectors(failed=True),
            Selectors(error="x"),
            Selectors(collection="c"),
        )
    )


def test_by_state_code_and_collection_together():
    locked = failed_document(EncryptedPdf(), collection="a")
    outage = failed_document(OcrUnavailable(), collection="b")
    good = sim.processed_document(PageState.NATIVE)
    assert selected(failed=True) == [locked, outage]
    assert selected(error="encrypted_pdf") == [locked]
    assert selected(error="encrypted_pdf", collection="b") == []
    assert selected(failed=True, collection="b") == [outage]
    assert selected(collection="default") == [good]
    assert selected(error="unknown") == []


def test_a_code_is_also_that_of_a_failed_page():
    document_id = sim.processed_document(PageState.NATIVE, PageState.FAILED)
    assert selected(error="page_unrenderable") == [document_id]
    assert selected(error="pages_failed") == [document_id]


def test_failed_and_error_look_at_the_newest_run():
    redone = failed_document(EncryptedPdf())
    sim.add_run(redone)
    assert selected(failed=True) == selected(error="encrypted_pdf") == []
    run = claim()
    sim.plan(run, PageState.NATIVE)
    runs.finish(run)
    assert selected(failed=True) == selected(error="encrypted_pdf") == []
    sim.add_run(redone, sim.OTHER_OPTIONS)
    runs.fail(claim(), OcrUnavailable())
    assert sim.document_row(redone).current_run_id == run.id
    assert selected(failed=True) == selected(error="ocr_unavailable") == [redone]


def test_ids_and_the_other_selectors_narrow_together():
    locked = failed_document(EncryptedPdf(), collection="a")
    outage = failed_document(OcrUnavailable(), collection="b")
    good = sim.processed_document(PageState.NATIVE)
    everything = (locked, outage, good)
    assert selected(ids=everything) == [locked, outage, good]
    assert selected(ids=everything, failed=True) == [locked, outage]
    assert selected(ids=everything, error="encrypted_pdf") == [locked]
    assert selected(ids=everything, failed=True, collection="b") == [outage]
    assert selected(ids=(good,), failed=True) == []


def test_unknown_ids_are_those_of_no_document():
    known, gone = sim.add_document(), sim.add_document()
    sim.execute("UPDATE documents SET deleted_at = now() WHERE id = :id", id=gone)
    with begin() as connection:
        assert unknown_ids(connection, (known, "nope", gone, "nope")) == sorted(["nope", gone])
        assert unknown_ids(connection, ()) == []


def test_what_killed_workers_is_redone_by_id_only():
    document_id = failed_document(WorkerCrashed())
    for selectors in ({"failed": True}, {"error": "worker_crashed"}, {"collection": "default"}):
        assert selected(**selectors) == []
    assert selected(ids=(document_id,)) == [document_id]
    assert selected(ids=(document_id,), failed=True) == [document_id]


def test_deleted_documents_are_not_meant():
    document_id = failed_document(EncryptedPdf())
    sim.execute("UPDATE documents SET deleted_at = now()")
    assert selected(failed=True) == selected(ids=(document_id,)) == []


def test_a_candidate_brings_its_newest_runs_options():
    document_id = sim.processed_document(PageState.NATIVE)
    sim.add_run(document_id, sim.OTHER_OPTIONS)
    with begin() as connection:
        [one] = select_documents(connection, Selectors(ids=(document_id, document_id)))
    assert (one.state, one.active, one.ocr, one.pages) == (RunState.QUEUED, True, "force", 0)


def test_good_pages_are_counted_once_whatever_run_they_are_in():
    document_id = sim.processed_document(PageState.NATIVE, PageState.FAILED, PageState.BLANK)
    sim.add_run(document_id)
    run = claim()
    sim.plan(run, PageState.NATIVE, PageState.NATIVE, PageState.PENDING)
    with begin() as connection:
        assert good_pages(connection, document_id, run.fingerprint) == 3
        assert good_pages(connection, document_id, sim.OTHER_OPTIONS.fingerprint) == 0
        assert good_pages(connection, "other", run.fingerprint) == 0
