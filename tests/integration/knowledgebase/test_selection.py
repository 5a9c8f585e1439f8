"""Selection of documents and pages for a reprocess."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from rag_service.database.engine import begin
from rag_service.errors import EncryptedPdf, OcrUnavailable, WorkerCrashed
from rag_service.jobs import runs
from rag_service.knowledgebase.selection import (
    Selectors,
    reused_pages,
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


def test_selectors_know_that_they_are_empty():
    assert Selectors().empty
    assert Selectors(error="", collection="", model_was="").empty
    assert not any(
        s.empty
        for s in (
            Selectors(ids=("a",)),
            Selectors(failed=True),
            Selectors(error="x"),
            Selectors(collection="c"),
            Selectors(truncated=True),
            Selectors(dpi_was=150),
            Selectors(since=datetime.now(UTC)),
        )
    )


def test_selection_by_state_code_and_collection():
    locked = failed_document(EncryptedPdf(), collection="a")
    outage = failed_document(OcrUnavailable(), collection="b")
    good = sim.processed_document(PageState.NATIVE)
    assert selected(failed=True) == [locked, outage]
    assert selected(error="encrypted_pdf") == [locked]
    assert selected(error="encrypted_pdf", collection="b") == []
    assert selected(failed=True, collection="b") == [outage]
    assert selected(collection="default") == [good]
    assert selected(error="unknown") == []


def test_an_error_code_also_selects_by_failed_pages():
    document_id = sim.processed_document(PageState.NATIVE, PageState.FAILED)
    assert selected(error="page_unrenderable") == [document_id]
    assert selected(error="pages_failed") == [document_id]


def test_failed_and_error_are_checked_on_the_newest_run():
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


def test_ids_and_other_selectors_are_combined():
    locked = failed_document(EncryptedPdf(), collection="a")
    outage = failed_document(OcrUnavailable(), collection="b")
    good = sim.processed_document(PageState.NATIVE)
    everything = (locked, outage, good)
    assert selected(ids=everything) == [locked, outage, good]
    assert selected(ids=everything, failed=True) == [locked, outage]
    assert selected(ids=everything, error="encrypted_pdf") == [locked]
    assert selected(ids=everything, failed=True, collection="b") == [outage]
    assert selected(ids=(good,), failed=True) == []


def test_unknown_ids_are_returned():
    known, gone = sim.add_document(), sim.add_document()
    sim.execute("UPDATE documents SET deleted_at = now() WHERE id = :id", id=gone)
    with begin() as connection:
        assert unknown_ids(connection, (known, "nope", gone, "nope")) == sorted(["nope", gone])
        assert unknown_ids(connection, ()) == []


def test_documents_that_crashed_workers_are_selected_by_id_only():
    document_id = failed_document(WorkerCrashed())
    for selectors in ({"failed": True}, {"error": "worker_crashed"}, {"collection": "default"}):
        assert selected(**selectors) == []
    assert selected(ids=(document_id,)) == [document_id]
    assert selected(ids=(document_id,), failed=True) == [document_id]


def test_deleted_documents_are_not_selected():
    document_id = failed_document(EncryptedPdf())
    sim.execute("UPDATE documents SET deleted_at = now()")
    assert selected(failed=True) == selected(ids=(document_id,)) == []


def test_a_candidate_has_its_newest_runs_options_and_page_count():
    document_id = sim.processed_document(PageState.NATIVE)
    sim.add_run(document_id, sim.OTHER_OPTIONS)
    with begin() as connection:
        [one] = select_documents(connection, Selectors(ids=(document_id, document_id)))
    assert (one.state, one.active, one.ocr, one.pages) == (RunState.QUEUED, True, "force", 1)


def test_good_pages_in_several_runs_are_counted_once():
    document_id = sim.processed_document(PageState.NATIVE, PageState.FAILED, PageState.BLANK)
    sim.add_run(document_id)
    run = claim()
    sim.plan(run, PageState.NATIVE, PageState.NATIVE, PageState.PENDING)
    with begin() as connection:
        assert reused_pages(connection, document_id, run.fingerprint) == 3
        assert reused_pages(connection, document_id, sim.OTHER_OPTIONS.fingerprint) == 0
        assert reused_pages(connection, "other", run.fingerprint) == 0


def read_document(*columns, state=PageState.OCR):
    """Add a processed document whose pages have these columns."""
    document_id = sim.add_document()
    run = claim()
    sim.plan(run, *[PageState.PENDING] * len(columns))
    for number, carried in enumerate(columns, start=1):
        sim.read(run, number, state, columns=carried)
    runs.finish(run)
    return document_id


def chosen(numbers=(), **selectors):
    with begin() as connection:
        found = select_documents(connection, Selectors(**selectors), numbers)
        return {one.id: one.chosen for one in found}


@pytest.mark.parametrize(
    ("selector", "value", "column", "carried"),
    [
        ("model_was", "old", "model", ("old", "new", "old")),
        ("engine_was", "vllm", "engine", ("vllm", None, "vllm")),
        ("version_was", "1", "parser_version", ("1", "11", "1")),
        ("dpi_was", 137, "dpi", (137.0, 150.0, 136.6)),
    ],
)
def test_pages_are_selected_by_their_columns(selector, value, column, carried):
    some = read_document(*({column: one} for one in carried))
    read_document({column: carried[1]}, {})
    assert chosen(**{selector: value}) == {some: (1, 3)}


def test_truncated_pages_are_selected():
    cut = read_document({}, state=PageState.TRUNCATED)
    read_document({})
    assert chosen(truncated=True) == {cut: (1,)}


def test_one_page_must_satisfy_all_conditions_on_pages():
    apart = read_document({"model": "old"}, {"engine": "vllm"})
    both = read_document({}, {"model": "old", "engine": "vllm"})
    assert chosen(model_was="old", engine_was="vllm") == {both: (2,)}
    assert chosen(ids=(apart,), model_was="old") == {apart: (1,)}
    assert chosen(collection="elsewhere", model_was="old") == {}


def test_page_numbers_select_pages_and_never_documents():
    three, one = read_document(*[{"model": "old"}] * 3), read_document({})
    numbers = [(2, 2), (3, 9)]
    assert chosen(numbers, collection="default") == {three: (2, 3), one: ()}
    assert chosen(numbers, model_was="old") == {three: (2, 3)}
    assert chosen([(9, 9)], model_was="old") == {three: ()}
    assert chosen(collection="default") == {three: None, one: None}


def test_conditions_on_pages_are_checked_on_the_current_run():
    """A later run that failed or was cancelled does not count."""
    document_id = read_document({"model": "old"}, {"model": "old"})
    for end in (lambda run: runs.fail(run, OcrUnavailable()), runs.finish):
        sim.add_run(document_id, sim.OTHER_OPTIONS)
        run = claim()
        sim.plan(run, PageState.PENDING, PageState.NATIVE)
        assert chosen(model_was="old") == {document_id: (1, 2)}
        sim.read(run, 1, columns={"model": "new"})
        end(run)
        before = chosen(model_was="old")
    assert before == {}
    assert chosen(model_was="new") == {document_id: (1,)}


def test_the_parser_is_checked_on_the_current_run():
    document_id = sim.processed_document(PageState.NATIVE)
    sim.add_run(document_id, replace(sim.OPTIONS, parser="other"))
    assert selected(parser_was="glmocr") == [document_id]
    assert selected(parser_was="other") == []


def test_times_are_compared_with_the_end_of_the_newest_run():
    early, late = failed_document(EncryptedPdf()), failed_document(EncryptedPdf())
    sim.add_document()
    for document_id, when in ((early, "2026-03-01 10:00Z"), (late, "2026-03-02 10:00Z")):
        sim.execute(
            "UPDATE runs SET finished_at = :when WHERE document_id = :id", id=document_id, when=when
        )
    between = datetime(2026, 3, 2, 10, tzinfo=UTC)
    assert selected(since=between) == [late]
    assert selected(before=between) == [early]
    assert selected(since=between - timedelta(days=1), before=between) == [early]
    assert selected(since=between, error="pages_failed") == []
