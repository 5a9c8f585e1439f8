"""A reprocess of many documents is a job: bounded, resumable, cancellable, kind to uploads."""

import threading

import pytest

from rag_service.documents import bulk_reprocess, deletion
from rag_service.documents.intake import require_backlog_space
from rag_service.documents.reprocess import Change
from rag_service.errors import BacklogFull, NotFound, WorkerCrashed
from rag_service.jobs import runs
from rag_service.knowledgebase import reprocess_jobs
from rag_service.knowledgebase.selection import Selectors
from rag_service.states import PageState, Priority
from tests import simulation as sim
from tests.conftest import changed_settings
from tests.simulation import at_once, claim

FAILED = Selectors(failed=True)
NEVER = threading.Event()


@pytest.fixture
def small(settings, monkeypatch):
    """Settings with space for 9 documents of a job; a request handles 2 itself."""
    monkeypatch.setattr(bulk_reprocess, "AT_ONCE", 2)
    return changed_settings(settings, limits={"max_backlog": 10})


def add_failed(number):
    return [sim.processed_document(PageState.NATIVE, PageState.FAILED) for _ in range(number)]


def start(settings, selectors=FAILED, change=None):
    job_id = bulk_reprocess.start_if_large(settings, selectors, change or Change())
    assert job_id is not None
    return job_id


def active():
    return sim.one("SELECT count(*) FROM runs WHERE state = 'queued'")[0]


def test_a_job_adds_a_run_for_each_document_and_ends(small):
    ids = add_failed(5)
    job_id = start(small)
    assert active() == 0
    assert bulk_reprocess.advance(small, NEVER) == 5
    job = reprocess_jobs.get_job(job_id)
    assert (job.state, job.total, job.handled, job.counts) == ("done", 5, 5, {"queued": 5})
    assert (job.runs_active, job.runs_failed, job.message) == (5, 0, None)
    assert {claim().document_id for _ in ids} == set(ids)


def test_a_small_selection_is_no_job(small):
    add_failed(2)
    assert bulk_reprocess.start_if_large(small, FAILED, Change()) is None
    assert reprocess_jobs.list_jobs(10) == []


def test_it_leaves_a_part_of_the_backlog_and_waits(small):
    add_failed(12)
    job_id = start(small)
    bulk_reprocess.advance(small, NEVER)
    assert active() == 9
    require_backlog_space(small, Priority.BULK)
    job = reprocess_jobs.get_job(job_id)
    assert (job.state, job.handled) == ("running", 9)
    assert "fewer than 9 bulk documents wait" in job.message
    runs.finish(claim())
    assert bulk_reprocess.advance(small, NEVER) == 1
    for _ in range(3):
        runs.finish(claim())
    assert bulk_reprocess.advance(small, NEVER) == 2
    assert reprocess_jobs.get_job(job_id).state == "done"


def test_a_full_backlog_makes_even_one_document_wait_in_a_job(small):
    [failed] = add_failed(1)
    for _ in range(9):
        sim.add_document()
    job_id = start(small, Selectors(ids=(failed,)))
    assert bulk_reprocess.advance(small, NEVER) == 0
    assert reprocess_jobs.get_job(job_id).message


def test_bulk_documents_do_not_refuse_an_interactive_one(small):
    for _ in range(10):
        sim.add_document()
    with pytest.raises(BacklogFull, match="10 bulk documents"):
        require_backlog_space(small, Priority.BULK)
    require_backlog_space(small, Priority.INTERACTIVE)
    sim.execute("UPDATE runs SET priority = 0")
    require_backlog_space(small, Priority.BULK)
    with pytest.raises(BacklogFull, match="10 interactive documents"):
        require_backlog_space(small, Priority.INTERACTIVE)


def test_a_batch_that_was_killed_is_done_again_and_nothing_twice(small, monkeypatch):
    add_failed(5)
    job_id = start(small)
    add_counts = reprocess_jobs.add_counts

    def killed(*_):
        if active_before:
            raise KeyboardInterrupt
        active_before.append(True)
        add_counts(*_)

    active_before = []
    monkeypatch.setattr(reprocess_jobs, "add_counts", killed)
    with pytest.raises(KeyboardInterrupt):
        bulk_reprocess.advance(small, NEVER)
    assert (active(), reprocess_jobs.get_job(job_id).handled) == (2, 2)
    monkeypatch.undo()
    bulk_reprocess.advance(small, NEVER)
    job = reprocess_jobs.get_job(job_id)
    assert (active(), job.counts, job.state) == (5, {"queued": 5}, "done")


def test_two_processes_add_each_run_once(small):
    add_failed(9)
    job_id = start(small)
    at_once(*[lambda: bulk_reprocess.advance(small, NEVER)] * 3)
    bulk_reprocess.advance(small, NEVER)
    job = reprocess_jobs.get_job(job_id)
    assert (active(), job.counts, job.state) == (9, {"queued": 9}, "done")


def test_the_same_job_again_adds_nothing(small):
    add_failed(4)
    start(small)
    second = start(small)
    bulk_reprocess.advance(small, NEVER)
    assert active() == 4
    assert reprocess_jobs.get_job(second).handled == 4


def test_documents_that_changed_meanwhile_are_not_redone(small):
    deleted, redone, crashed, failed = add_failed(4)
    job_id = start(small)
    deletion.delete(deleted)
    sim.execute("UPDATE runs SET state = 'processed', error_code = NULL WHERE document_id = :d",
                d=redone)  # fmt: skip
    sim.add_run(crashed)
    runs.fail(claim(), WorkerCrashed())
    bulk_reprocess.advance(small, NEVER)
    assert reprocess_jobs.get_job(job_id).counts == {"queued": 1, "nothing_to_redo": 3}
    assert claim().document_id == failed


def test_a_cancelled_job_adds_no_more_and_keeps_its_runs(small):
    add_failed(12)
    job_id = start(small)
    bulk_reprocess.advance(small, NEVER)
    assert reprocess_jobs.cancel_job(job_id)
    assert not reprocess_jobs.cancel_job(job_id)
    runs.finish(claim())
    assert bulk_reprocess.advance(small, NEVER) == 0
    assert (active(), reprocess_jobs.get_job(job_id).state) == (8, "cancelled")
    reprocess_jobs.remove_ended()
    assert sim.rows("SELECT 1 FROM reprocess_items") == []
    sim.execute("UPDATE reprocess_jobs SET ended_at = now() - interval '31 days'")
    reprocess_jobs.remove_ended()
    for act in (reprocess_jobs.get_job, reprocess_jobs.cancel_job):
        with pytest.raises(NotFound):
            act(job_id)


def test_a_job_keeps_its_selected_pages_and_options(small):
    for _ in range(3):
        sim.processed_document(PageState.NATIVE, PageState.NATIVE)
    change = Change(pages=((2, 2),), ocr="force", priority=Priority.INTERACTIVE)
    start(small, Selectors(collection="default"), change)
    bulk_reprocess.advance(small, NEVER)
    found = {(tuple(r.redo_pages), r.ocr, r.priority)
             for r in sim.rows("SELECT * FROM runs WHERE state = 'queued'")}  # fmt: skip
    assert found == {((2,), "force", 0)}
