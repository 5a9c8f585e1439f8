"""Pages: planned once, stored once, tried later, reused from earlier runs."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as bounded
from hypothesis import strategies as st

from rag_service.database.engine import begin
from rag_service.errors import OcrRejected, PageTimeout
from rag_service.jobs import run_pages, runs
from rag_service.jobs.run_pages import PendingPage, PlannedRow, StoredPage
from rag_service.states import GOOD, LayoutMode, PageState, Stage
from tests import simulation as sim
from tests.simulation import claim, page_row, planned_numbers

pytestmark = pytest.mark.usefixtures("settings")


def held_run(*states):
    """Return a run held by OCR with one pending page, then pages in these states."""
    sim.ready_run(*states)
    return claim(Stage.OCR)


def test_a_plan_stores_done_and_pending_pages():
    sim.add_document()
    run = claim()
    states = [PageState.NATIVE, PageState.PENDING, PageState.BLANK, PageState.FAILED]
    sim.plan(run, *states)
    assert planned_numbers(run) == {1, 2, 3, 4}
    assert run_pages.pending(run) == [PendingPage(2, 0, False)]
    stored = [page_row(run.id, number) for number in range(1, 5)]
    assert [row.state for row in stored] == states
    assert [row.stored_at is not None for row in stored] == [True, False, True, True]
    assert (stored[3].error_code, stored[3].error_retryable) == ("page_unrenderable", False)
    assert (stored[0].markdown, stored[0].fingerprint) == ("some text", run.fingerprint)
    with begin() as connection:
        assert run_pages.failed_numbers(connection, run.id) == [4]


def test_a_planned_page_is_not_planned_again():
    run = held_run()
    sim.read(run, 1)
    before = page_row(run.id, 1)
    run_pages.store_plan(run, [sim.planned(n, PageState.PENDING) for n in (1, 2)])
    assert page_row(run.id, 1) == before
    assert page_row(run.id, 2).state == PageState.PENDING


def test_a_done_page_is_stored_once():
    run = held_run()
    sim.read(run, 1)
    before = page_row(run.id, 1)
    sim.read(run, 1, PageState.FAILED)
    sim.read(run, 1, retry_in=5)
    assert page_row(run.id, 1) == before


def test_the_columns_of_a_read_page_are_stored():
    run = held_run()
    run_pages.mark_in_progress(run, 1)
    assert page_row(run.id, 1).hand_epoch == run.epoch
    columns = {
        "finish_reason": "stop",
        "prompt_tokens": 900,
        "completion_tokens": 80,
        "seconds": 1.5,
        "engine": "sglang",
        "model": "glm-ocr",
        "dpi": 150.0,
        "parser_version": "1",
    }
    sim.read(run, 1, columns=columns)
    row = page_row(run.id, 1)
    assert {name: getattr(row, name) for name in columns} == columns
    assert (row.state, row.markdown, row.parser) == ("ocr", "text of 1", "glmocr")
    assert (row.hand_epoch, row.tries, row.error_code) == (None, 0, None)


def test_a_failed_page_has_its_error():
    run = held_run()
    error = OcrRejected("400: \x00 no")
    run_pages.store(run, StoredPage(1, PageState.FAILED, "", {}, error=error))
    row = page_row(run.id, 1)
    assert (row.state, row.error_code, row.error_message) == ("failed", "ocr_rejected", "400:   no")
    assert row.error_retryable is False


def test_a_later_try_is_counted_and_waits_for_its_time():
    run = held_run(PageState.PENDING)
    sim.read(run, 1, PageState.PENDING, retry_in=3600)
    assert run_pages.pending(run) == [PendingPage(1, 1, True), PendingPage(2, 0, False)]
    assert page_row(run.id, 1).stored_at is None
    sim.read(run, 2)
    assert 3590 < run_pages.seconds_until_due(run) <= 3600
    sim.execute("UPDATE pages SET retry_at = now() - interval '1 s' WHERE number = 1")
    assert run_pages.pending(run) == [PendingPage(1, 1, False)]
    assert run_pages.seconds_until_due(run) == 0
    sim.read(run, 1)
    assert (page_row(run.id, 1).tries, page_row(run.id, 1).retry_at) == (1, None)


def test_a_page_is_due_although_others_wait_for_their_later_try():
    run = held_run(PageState.PENDING)
    sim.read(run, 1, PageState.PENDING, retry_in=3600)
    assert run_pages.pending(run)[1] == PendingPage(2, 0, False)


def test_warnings_of_the_plan_and_of_the_reader_are_kept():
    sim.add_document()
    run = claim()
    row = sim.planned(1, PageState.PENDING)
    warning = {"code": "text_layer_rejected", "message": "garbled"}
    run_pages.store_plan(run, [PlannedRow(1, "ocr", "", row.state, 1, 1, warnings=[warning])])
    cut = {"code": "page_truncated", "message": "cut"}
    run_pages.store(run, StoredPage(1, PageState.TRUNCATED, "t", {}, warnings=[cut]))
    assert page_row(run.id, 1).warnings == [warning, cut]


# Characters that PostgreSQL rejects in text and JSONB, and others.
NASTY = st.text(st.sampled_from("a ü\n\x00\x01\x7f\ud800\udfff\uffff\U0001f600\\\"'"), max_size=12)


@bounded(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(words=st.lists(NASTY, min_size=10, max_size=10))
def test_no_text_from_outside_is_rejected_by_the_database(words):
    sim.add_document()
    run = claim()
    remark = {"code": words[0], "message": words[1], words[2]: [words[3], {words[4]: 1}]}
    runs.store_preflight(run, 2, [remark])
    error = PageTimeout(words[5] or None)
    run_pages.store_plan(
        run,
        [
            PlannedRow(1, "ocr", words[6], PageState.PENDING, 1, 1, words[7], [remark]),
            PlannedRow(2, "ocr", words[6], PageState.FAILED, 1, 1, words[7], [remark], error),
        ],
    )
    columns = {"engine": words[8], "model": words[9], "finish_reason": words[0]}
    run_pages.store(run, StoredPage(1, PageState.OCR, words[1], columns, [remark]))
    stored = page_row(run.id, 1)
    assert stored.markdown == expected_text(words[1])
    assert stored.engine == expected_text(words[8])
    assert stored.warnings[-1]["message"] == expected_text(words[1])
    runs.fail(run, error)


def expected_text(text):
    """Return the text that must be stored, computed independently of the product."""
    gone = ("\x01", "\x7f", "\ud800", "\udfff", "\uffff")
    return "".join(" " if c == "\x00" else c for c in text if c not in gone)


ALL_STATES = [
    PageState.NATIVE,
    PageState.OCR,
    PageState.BLANK,
    PageState.NO_TEXT,
    PageState.TRUNCATED,
    PageState.FAILED,
]


def read_document(*states, options=sim.OPTIONS):
    document_id = sim.add_document(options=options)
    read_run(*states)
    return document_id


def read_run(*states, prefix="text"):
    run = claim()
    sim.plan(run, *[PageState.PENDING] * len(states))
    for number, state in enumerate(states, start=1):
        outcome = StoredPage(number, state, f"{prefix} {number}", {"engine": "e", "seconds": 2.0})
        run_pages.store(run, outcome)
    runs.finish(run)
    return run


def test_good_pages_with_equal_options_are_reused_and_failed_ones_are_not():
    document_id = read_document(*ALL_STATES)
    first = sim.newest_run(document_id)
    sim.add_run(document_id)
    run = claim()
    assert run_pages.reuse(run) == len(GOOD)
    assert planned_numbers(run) == {1, 2, 3, 4, 5}
    for number, state in enumerate(ALL_STATES[:-1], start=1):
        old, new = page_row(first.id, number), page_row(run.id, number)
        assert (new.state, new.markdown, new.reused) == (state, f"text {number}", True)
        assert (new.engine, new.seconds, new.stored_at) == ("e", 2.0, old.stored_at)
        assert (new.plan_reason, new.tries, new.hand_epoch) == ("reused", 0, None)
    assert run_pages.reuse(run) == 0


@pytest.mark.parametrize(
    "options",
    [
        replace(sim.OPTIONS, parser="other"),
        replace(sim.OPTIONS, model="glm-ocr-2"),
        replace(sim.OPTIONS, ocr="force"),
        replace(sim.OPTIONS, dpi=200),
        replace(sim.OPTIONS, layout=LayoutMode.REGIONS),
    ],
)
def test_nothing_is_reused_with_other_options(options):
    document_id = read_document(PageState.OCR, PageState.NATIVE)
    sim.add_run(document_id, options)
    assert run_pages.reuse(claim()) == 0


def test_with_pages_to_redo_all_other_pages_of_the_current_run_are_reused():
    document_id = read_document(PageState.OCR, PageState.TRUNCATED, PageState.OCR, PageState.FAILED)
    other = replace(sim.OPTIONS, model="glm-ocr-2")
    sim.add_run(document_id, other, redo_pages=[1, 2])
    run = claim()
    assert run.redo_pages == (1, 2)
    assert run_pages.reuse(run) == 1
    assert planned_numbers(run) == {3}
    assert page_row(run.id, 3).fingerprint == sim.OPTIONS.fingerprint


def test_with_pages_to_redo_the_current_runs_page_is_reused_first():
    document_id = read_document(PageState.OCR, PageState.OCR, PageState.FAILED)
    sim.add_run(document_id)
    read_run(PageState.OCR, PageState.FAILED, PageState.OCR, prefix="newer")
    answers = sim.document_row(document_id).current_run_id
    sim.add_run(document_id)
    older, newer = sim.rows("SELECT id FROM runs WHERE number < 3 ORDER BY number")
    sim.execute("UPDATE documents SET current_run_id = :id", id=older.id)
    assert answers == newer.id
    sim.execute("UPDATE runs SET redo_pages = '{2}' WHERE number = 3")
    run = claim()
    assert run_pages.reuse(run) == 2
    assert page_row(run.id, 1).markdown == "text 1"
    assert page_row(run.id, 3).markdown == "newer 3"


def test_the_newest_good_page_is_reused_although_a_newer_one_failed():
    document_id = read_document(PageState.OCR, PageState.OCR)
    sim.add_run(document_id)
    read_run(PageState.OCR, PageState.FAILED, prefix="newer")
    sim.add_run(document_id)
    run = claim()
    assert run_pages.reuse(run) == 2
    assert page_row(run.id, 1).markdown == "newer 1"
    assert page_row(run.id, 2).markdown == "text 2"


def test_pages_from_before_a_run_with_other_options_are_reused():
    document_id = read_document(PageState.OCR)
    sim.add_run(document_id, sim.OTHER_OPTIONS)
    read_run(PageState.OCR, prefix="forced")
    sim.add_run(document_id)
    run = claim()
    assert run_pages.reuse(run) == 1
    assert page_row(run.id, 1).markdown == "text 1"


def test_pages_of_a_cancelled_run_are_reused():
    held = held_run(PageState.PENDING)
    sim.read(held, 1)
    sim.execute("UPDATE runs SET state = 'cancelled'")
    sim.add_run(held.document_id)
    run = claim()
    assert run_pages.reuse(run) == 1
    assert planned_numbers(run) == {1}


def test_no_page_is_reused_from_another_document():
    read_document(PageState.OCR)
    sim.add_document()
    assert run_pages.reuse(claim()) == 0


def test_pages_that_the_new_run_has_are_not_replaced():
    document_id = read_document(PageState.OCR, PageState.OCR)
    sim.add_run(document_id)
    run = claim()
    run_pages.store_plan(run, [sim.planned(1, PageState.PENDING)])
    assert run_pages.reuse(run) == 1
    assert page_row(run.id, 1).state == PageState.PENDING


def test_concurrent_reuse_copies_each_page_once():
    document_id = read_document(*[PageState.OCR] * 5)
    for _ in range(10):
        sim.add_run(document_id)
        run = claim()
        assert sum(sim.at_once(*[lambda run=run: run_pages.reuse(run)] * 4)) == 5
        sim.execute("UPDATE runs SET state = 'cancelled' WHERE id = :id", id=run.id)
