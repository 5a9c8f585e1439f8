"""Views of jobs on RunPod: why documents wait, lists, totals and costs."""

from __future__ import annotations

from typing import Any

import pytest

from rag_service.database.totals import read_totals
from rag_service.errors import RemoteJobFailed
from rag_service.jobs import leases, remote_endpoints, remote_jobs, remote_posts, runs
from rag_service.jobs.remote_endpoints import LiveJobs
from rag_service.jobs.remote_jobs import PollNote
from rag_service.jobs.run_pages import StoredPage
from rag_service.knowledgebase import document_queries, page_queries
from rag_service.knowledgebase.job_queries import list_jobs
from rag_service.states import JobOutcome, PageState, PostReason, Stage
from tests import simulation as sim
from tests.posts import (
    BASE,
    ENDPOINT,
    again,
    cancel,
    held_run,
    live_job,
    open_job,
    read_page,
    settle,
)

pytestmark = pytest.mark.usefixtures("settings")


def shown(run: Any) -> Any:
    return document_queries.get_document(run.document_id, None)


def endpoint(long: float = 600) -> LiveJobs:
    return remote_endpoints.live_jobs(BASE, ENDPOINT, long=long)


# Why a document waits.


def test_a_document_waits_for_remote_jobs_once_all_pages_are_posted() -> None:
    run = held_run(3)
    assert shown(run).waiting_for is None
    first = live_job(run, 1, 2)
    assert shown(run).waiting_for is None, "page 3 is still to be posted"
    third = live_job(run, 3)
    assert (shown(run).status, shown(run).waiting_for) == ("ocr", "remote_job")
    settle(first, read_page(1), again(2), reasons={2: PostReason.SECOND_TRY})
    assert shown(run).waiting_for is None, "page 2 is to be posted again"
    live_job(run, 2, reason=PostReason.SECOND_TRY)
    remote_jobs.leave_to_maintenance(run)
    assert (shown(run).status, shown(run).waiting_for) == ("remote", "remote_job")
    settle(third, read_page(3))
    assert shown(run).waiting_for == "worker"


def test_a_document_does_not_wait_for_a_post_in_progress() -> None:
    run = held_run(1)
    job_id = open_job(run, 1)
    assert shown(run).waiting_for is None
    remote_posts.note_lost(job_id, "cut")
    assert shown(run).waiting_for == "remote_job"


def test_a_document_without_a_fork_waits_for_a_worker() -> None:
    run = held_run(1)
    live_job(run, 1)
    sim.outlast(run.id)
    assert shown(run).waiting_for == "worker"


# Pages of a run that has ended.


@pytest.mark.parametrize("how", ["cancelled", "failed", "crashed"])
def test_an_unread_page_of_an_ended_run_is_not_pending(how: str) -> None:
    run = held_run(2)
    sim.read(run, 1)
    assert [page.status for page in page_queries.list_pages(run.id)] == ["ocr", "pending"]
    if how == "cancelled":
        cancel(run)
    elif how == "failed":
        runs.fail(run, RemoteJobFailed())
    else:
        leases.release_crashed("worker", _task(run), sim.lease(crash_limit=1))
    assert shown(run).latest_run.status in {"cancelled", "failed"}
    assert [page.status for page in page_queries.list_pages(run.id)] == ["ocr", "not_read"]
    page = page_queries.get_page(run.id, 2)
    assert page is not None
    assert (page.status, page.error) == ("not_read", None)
    assert sim.page_row(run.id, 2).state == PageState.PENDING


def _task(run: Any) -> str:
    task: str = sim.run_row(run.id).lease_task
    return task


# A document's jobs.


def test_a_documents_jobs_are_listed_with_all_columns() -> None:
    run = held_run(4)
    done, failing = live_job(run, 1, 2), live_job(run, 3)
    lost = open_job(run, 4)
    settle(done, read_page(1), read_page(2), execution_ms=2500, delay_ms=40,
           last_status="COMPLETED")  # fmt: skip
    remote_jobs.note_poll(
        failing.id, PollNote(next_in=9, status="IN_PROGRESS", execution_ms=100, error="")
    )
    remote_jobs.note_poll(failing.id, PollNote(next_in=9, error="HTTP 502: bad gateway"))
    remote_posts.note_lost(lost, "cut")
    first, second, third = list_jobs(run.document_id)
    assert (first.remote_id, first.pages, first.reason) == (done.remote_id, [1, 2], "first")
    assert (first.state, first.outcome, first.last_status) == ("ended", "completed", "COMPLETED")
    assert (first.delay_ms, first.execution_ms, first.usd) == (40, 2500, 1.25)
    assert (first.run_id, first.endpoint_id, first.error) == (run.id, ENDPOINT, None)
    assert (second.state, second.outcome, second.polls) == ("live", None, 2)
    assert (second.last_status, second.error) == ("IN_PROGRESS", "HTTP 502: bad gateway")
    assert (third.remote_id, third.state, third.error, third.usd) == (None, "lost", "cut", None)


def test_the_age_of_a_job_stops_at_its_end() -> None:
    run = held_run(2)
    ended, live = live_job(run, 1), live_job(run, 2)
    settle(ended, read_page(1))
    sim.execute("UPDATE remote_jobs SET submitted_at = submitted_at - interval '100 s'")
    sim.execute("UPDATE remote_jobs SET ended_at = ended_at - interval '90 s' WHERE id = :id",
                id=ended.id)  # fmt: skip
    young, old = [job.age_seconds for job in list_jobs(run.document_id)]
    assert young < 100 <= old
    assert live.remote_id is not None


def test_the_jobs_of_all_runs_of_one_document_are_listed() -> None:
    run, other = held_run(1), held_run(1)
    settle(live_job(run, 1), read_page(1))
    live_job(other, 1)
    runs.finish(run)
    newer = sim.add_run(run.document_id, reuse_pages=False)
    planning = sim.claim()
    sim.plan(planning, PageState.PENDING)
    runs.hand_to_ocr(planning)
    live_job(sim.claim(Stage.OCR), 1)
    assert [job.run_id for job in list_jobs(run.document_id)] == [run.id, newer]


def test_a_documents_cost_is_the_sum_of_its_jobs_at_their_own_price() -> None:
    run = held_run(3)
    settle(live_job(run, 1), again(1), outcome=JobOutcome.FAILED, execution_ms=1500)
    settle(live_job(run, 1), read_page(1), execution_ms=2500)
    remote_jobs.note_poll(live_job(run, 2).id, PollNote(next_in=9, execution_ms=1000))
    open_job(run, 3)
    cost = shown(run).cost
    assert (cost.gpu_seconds, cost.usd, cost.lower_bound) == (5.0, 2.5, True)
    assert sum(job.usd or 0 for job in list_jobs(run.document_id)) == 2.5


# All jobs together.


def test_totals_count_live_jobs_by_last_status_and_ended_ones_by_outcome() -> None:
    assert read_totals().jobs.live == {}
    run = held_run(5)
    jobs = [live_job(run, number) for number in range(1, 5)]
    open_job(run, 5)
    remote_jobs.note_poll(jobs[0].id, PollNote(next_in=9, status="IN_QUEUE"))
    remote_jobs.note_poll(jobs[1].id, PollNote(next_in=9, status="IN_PROGRESS", execution_ms=500))
    settle(jobs[2], read_page(3), execution_ms=1500)
    totals = read_totals().jobs
    assert totals.live == {"IN_QUEUE": 1, "IN_PROGRESS": 1, "live": 1, "submitting": 1}
    assert totals.ended == {"completed": 1}
    assert (totals.gpu_seconds, totals.usd) == (2.0, 1.0)


# An endpoint.


def test_only_jobs_queued_for_long_are_reported_as_such() -> None:
    run = held_run(2)
    running, queued = live_job(run, 1), live_job(run, 2)
    remote_jobs.note_poll(running.id, PollNote(next_in=9, status="IN_PROGRESS", error=""))
    remote_jobs.note_poll(queued.id, PollNote(next_in=9, status="IN_QUEUE", error=""))
    assert endpoint() == LiveJobs(2, False, True, None, 0, 0, None)
    sim.execute("UPDATE remote_jobs SET submitted_at = now() - interval '601 s'")
    assert endpoint().queued_for_long
    assert remote_endpoints.live_jobs(BASE, "another", long=600).number == 0
    settle(queued, read_page(2))
    assert not endpoint().queued_for_long


def test_a_failed_poll_counts_until_one_is_answered() -> None:
    run = held_run(2)
    one, other = live_job(run, 1), live_job(run, 2)
    assert endpoint() == LiveJobs(2, False, False, None, 0, 0, None)
    for job in (one, other):
        remote_jobs.note_poll(job.id, PollNote(next_in=9, status="IN_QUEUE", error=""))
        remote_jobs.note_poll(job.id, PollNote(next_in=9, error="no answer"))
    assert (endpoint().answered, endpoint().poll_error) == (False, "no answer")
    remote_jobs.note_poll(one.id, PollNote(next_in=9, status="IN_QUEUE", error=""))
    assert (endpoint().answered, endpoint().poll_error) == (True, "no answer")
    settle(one, StoredPage(1, PageState.OCR, "text", {}))
    assert not endpoint().answered


def test_a_lost_post_keeps_its_message_while_no_id_is_known() -> None:
    run = held_run(1)
    job_id = open_job(run, 1)
    remote_posts.note_lost(job_id, "cut")
    remote_jobs.note_poll(job_id, PollNote(next_in=9))
    [job] = list_jobs(run.document_id)
    assert (job.state, job.error) == ("lost", "cut")
