"""Rows of posts: one live job a page, late ids, ends at the same time, claims of pollers."""

import threading

import pytest
from sqlalchemy import text

from rag_service.config.loader import get_settings
from rag_service.database import document_rows
from rag_service.database.engine import begin
from rag_service.documents import deletion
from rag_service.documents.storage import DocumentStore
from rag_service.errors import LeaseLost, RemoteJobFailed
from rag_service.jobs import leases, remote_jobs, remote_posts, runs
from rag_service.jobs.leases import Blame
from rag_service.jobs.remote_jobs import PollNote
from rag_service.jobs.remote_posts import FreePages
from rag_service.jobs.run_pages import StoredPage
from rag_service.runpod.job_keys import token_digest
from rag_service.states import JobOutcome, PageState, PostReason, RunState, Stage
from tests import simulation as sim
from tests.posts import (
    again,
    cancel,
    claims,
    held_run,
    job_row,
    live_job,
    open_job,
    read_page,
    row,
    settle,
)
from tests.simulation import at_once, run_row

pytestmark = pytest.mark.usefixtures("settings")
ROUNDS = 15


# Opening.


def test_only_one_of_two_simultaneous_posts_for_a_page_is_made():
    for _ in range(ROUNDS):
        run = held_run()
        made = at_once(lambda: open_job(run, 1, 2), lambda: open_job(run, 2))  # noqa: B023
        opened = [job_id for job_id in made if isinstance(job_id, str)]
        assert sorted(map(type, made), key=str) == sorted([str, LeaseLost], key=str)
        assert [job.id for job in remote_jobs.jobs_of(run.id)] == opened
        assert set(claims(run)) - {None} == set(opened)


def test_a_page_that_is_done_is_not_posted():
    run = held_run()
    sim.read(run, 1)
    with pytest.raises(LeaseLost):
        open_job(run, 1, 2)
    assert claims(run) == [None, None]
    assert remote_jobs.jobs_of(run.id) == []


def test_a_released_run_posts_nothing():
    run = held_run()
    leases.release(run)
    with pytest.raises(LeaseLost):
        open_job(run, 1)
    assert remote_jobs.jobs_of(run.id) == []


def test_the_limit_of_live_jobs_holds_for_simultaneous_posts():
    for number in range(ROUNDS):
        endpoint = f"ep-{number}"
        held = [held_run(1) for _ in range(4)]
        made = at_once(
            *[lambda run=run: open_job(run, 1, max_live=2, endpoint=endpoint) for run in held]  # noqa: B023
        )
        assert sum(job_id is not None for job_id in made) == 2
        assert not [error for error in made if isinstance(error, Exception)]


def test_only_live_jobs_of_the_same_endpoint_count_for_its_limit():
    first, second, third = (held_run(1) for _ in range(3))
    job = live_job(first, 1)
    assert open_job(second, 1, max_live=1) is None
    assert open_job(second, 1, max_live=1, endpoint="another") is not None
    settle(job, read_page(1))
    assert open_job(third, 1, max_live=1) is not None


# The id that a post returns.


def test_a_late_id_is_stored_for_the_runs_new_owner():
    run = held_run()
    job_id = open_job(run, 1, 2)
    sim.expire(run.id)
    newer = sim.claim(Stage.OCR)
    assert remote_posts.note_interrupted(newer) == 1
    remote_posts.store_remote_id(job_id, "late")
    assert (row(job_id).state, row(job_id).remote_id) == ("live", "late")
    assert not row(job_id).cancel_wanted
    assert remote_posts.free_pages(newer) == []


def test_a_late_id_of_a_cancelled_run_marks_the_job_for_cancellation():
    run = held_run()
    job_id = open_job(run, 1, 2)
    assert cancel(run)
    remote_posts.store_remote_id(job_id, "late")
    due = remote_jobs.claim_due(10)
    assert [(job.remote_id, job.cancel_wanted) for job in due] == [("late", True)]


def test_an_id_is_stored_once():
    run = held_run()
    job_id = open_job(run, 1)
    remote_posts.store_remote_id(job_id, "first")
    remote_posts.store_remote_id(job_id, "second")
    assert row(job_id).remote_id == "first"


def test_a_late_id_of_a_repeated_post_claims_no_page():
    run = held_run()
    job_id = open_job(run, 1, 2)
    remote_posts.note_lost(job_id, "cut")
    remote_posts.free_lost(run, job_id)
    newer = live_job(run, 1, 2, reason=PostReason.LOST_ANSWER)
    remote_posts.store_remote_id(job_id, "late")
    assert set(claims(run)) == {newer.id}
    assert settle(job_row(run, job_id), read_page(1), read_page(2))
    assert sim.page_row(run.id, 1).state == PageState.PENDING
    assert settle(newer, read_page(1), read_page(2))
    assert sim.page_row(run.id, 1).markdown == "text of 1"


# Refused, lost, interrupted.


def test_a_refused_post_frees_its_pages():
    run = held_run()
    job_id = open_job(run, 1, 2)
    remote_posts.note_refused(job_id, "429")
    assert (row(job_id).state, row(job_id).outcome) == ("ended", "refused")
    assert remote_posts.free_pages(run) == [FreePages(PostReason.FIRST, (1, 2))]


@pytest.mark.parametrize("answered", [True, False])
def test_a_job_that_may_exist_is_not_noted_as_refused(answered):
    """A fork that is stopped after its post went out frees no page."""
    run = held_run()
    job_id = open_job(run, 1, 2)
    if answered:
        remote_posts.store_remote_id(job_id, "there")
    else:
        remote_posts.note_lost(job_id, "cut")
    remote_posts.note_refused(job_id, "stopped")
    assert row(job_id).state == ("live" if answered else "lost")
    assert claims(run) == [job_id, job_id]


def test_only_posts_of_earlier_claims_are_noted_as_interrupted():
    run = held_run(3)
    old = open_job(run, 1)
    leases.release(run)
    newer = sim.claim(Stage.OCR)
    own = open_job(newer, 2)
    assert remote_posts.note_interrupted(newer) == 1
    assert (row(old).state, row(own).state) == ("lost", "submitting")
    assert row(old).lost_at is not None


def test_a_lost_post_is_repeated_with_the_same_pages():
    """Its request key names exactly its pages, even if others are free too."""
    run = held_run(9)
    lost = open_job(run, 2, 3, 5)
    other = live_job(run, 6, 7)
    remote_posts.note_lost(lost, "cut")
    settle(other, again(6), again(7), reasons={6: PostReason.SECOND_TRY, 7: PostReason.SECOND_TRY})
    remote_posts.free_lost(run, lost)
    assert row(lost).outcome == JobOutcome.REPEATED
    assert sorted(remote_posts.free_pages(run), key=lambda free: free.numbers) == [
        FreePages(PostReason.FIRST, (1, 4, 8, 9)),
        FreePages(PostReason.LOST_ANSWER, (2, 3, 5), as_before=True),
        FreePages(PostReason.SECOND_TRY, (6, 7), as_before=True),
    ]


def test_two_lost_posts_are_never_merged():
    run = held_run(4)
    for pages in [(1, 2), (3, 4)]:
        job_id = open_job(run, *pages)
        remote_posts.note_lost(job_id, "cut")
        remote_posts.free_lost(run, job_id)
    assert [free.numbers for free in remote_posts.free_pages(run)] == [(1, 2), (3, 4)]


def test_a_lost_lease_repeats_no_post():
    run = held_run()
    job_id = open_job(run, 1, 2)
    remote_posts.note_lost(job_id, "cut")
    leases.release(run)
    with pytest.raises(LeaseLost):
        remote_posts.free_lost(run, job_id)
    assert row(job_id).state == "lost"


def test_every_reason_of_a_pages_posts_is_returned():
    run = held_run()
    settle(live_job(run, 1, 2), again(1), again(2), reasons={1: PostReason.SECOND_TRY})
    live_job(run, 1, reason=PostReason.SECOND_TRY)
    assert remote_jobs.reasons_so_far(run.id) == {
        1: {PostReason.FIRST, PostReason.SECOND_TRY}, 2: {PostReason.FIRST},
    }  # fmt: skip


# Settling.


def test_a_job_is_settled_once_by_the_first_poller():
    for _ in range(ROUNDS):
        run = held_run()
        job = live_job(run, 1, 2)
        fork = lambda: settle(job, read_page(1), read_page(2))  # noqa: E731, B023
        assert sorted(at_once(fork, fork)) == [False, True]
        assert runs.finish(run) is RunState.PROCESSED


def test_a_settled_job_changes_no_page_of_the_next_one():
    run = held_run(1)
    first = live_job(run, 1)
    assert settle(first, again(1), reasons={1: PostReason.SECOND_TRY})
    second = live_job(run, 1, reason=PostReason.SECOND_TRY)
    assert not settle(first, read_page(1))
    assert claims(run) == [second.id]
    assert sim.page_row(run.id, 1).state == PageState.PENDING


def test_only_finished_pages_clear_the_crash_counts():
    run = held_run(2)
    set_counts = "UPDATE runs SET crashes = 2, expiries = 5 WHERE id = :id"
    sim.execute(set_counts, id=run.id)
    settle(live_job(run, 1), again(1), reasons={1: PostReason.SECOND_TRY})
    assert (sim.run_row(run.id).crashes, sim.run_row(run.id).expiries) == (2, 5)
    settle(live_job(run, 2), read_page(2))
    assert (sim.run_row(run.id).crashes, sim.run_row(run.id).expiries) == (0, 0)


def test_the_last_job_of_a_remote_run_makes_it_claimable():
    run = held_run(1)
    job = live_job(run, 1)
    remote_jobs.leave_to_maintenance(run)
    assert sim.run_row(run.id).state == RunState.REMOTE
    assert sim.try_claim(Stage.OCR) is None
    settle(job, read_page(1), execution_ms=4000, gauges={"slots": 8}, last_status="COMPLETED")
    newer = sim.claim(Stage.OCR)
    assert (newer.id, newer.epoch) == (run.id, run.epoch + 1)
    assert (row(job.id).execution_ms, row(job.id).gauges) == (4000, {"slots": 8})


def test_a_run_released_while_its_last_job_ends_stays_claimable():
    """A remote run without a live job would never be continued."""
    for _ in range(ROUNDS):
        run = held_run(1)
        job = live_job(run, 1)
        at_once(
            lambda: remote_jobs.leave_to_maintenance(run),  # noqa: B023
            lambda: settle(job, read_page(1)),  # noqa: B023
        )
        assert sim.run_row(run.id).state == RunState.READY
        assert runs.finish(sim.claim(Stage.OCR)) is RunState.PROCESSED


def test_a_release_that_waited_for_the_jobs_end_sees_it():
    run = held_run(1)
    job = live_job(run, 1)
    leaving = threading.Thread(target=remote_jobs.leave_to_maintenance, args=[run])
    with begin() as connection:
        connection.execute(text("SELECT 1 FROM runs WHERE id = :id FOR UPDATE"), {"id": run.id})
        end = "UPDATE remote_jobs SET state = 'ended' WHERE id = :id"
        connection.execute(text(end), {"id": job.id})
        leaving.start()
        sim.wait_until_blocked()
    leaving.join()
    assert sim.run_row(run.id).state == RunState.READY


def test_a_result_after_the_cancel_changes_no_record():
    run = held_run(1)
    job = live_job(run, 1)
    assert cancel(run)
    failed = StoredPage(1, PageState.FAILED, "", {}, error=RemoteJobFailed())
    assert settle(job, failed, outcome=JobOutcome.FAILED)
    record = sim.run_row(run.id)
    assert (record.state, record.error_code) == ("cancelled", "cancelled")


# Polling.


def test_simultaneous_pollers_never_get_the_same_job():
    run = held_run(6)
    jobs = {live_job(run, number).id for number in range(1, 7)}
    remote_jobs.leave_to_maintenance(run)
    for _ in range(ROUNDS):
        taken = at_once(*[lambda: remote_jobs.claim_due(3)] * 3)
        ids = [job.id for part in taken for job in part]
        assert len(ids) == len(set(ids))
        assert set(ids) == jobs
        for job_id in ids:
            remote_jobs.note_poll(job_id, PollNote(next_in=0))


def test_a_job_that_goes_on_is_polled_again_later():
    run = held_run(1)
    job = live_job(run, 1)
    assert len(remote_jobs.claim_due(9, run_id=run.id)) == 1
    assert remote_jobs.claim_due(9, run_id=run.id) == []
    remote_jobs.note_poll(job.id, PollNote(next_in=60, status="IN_QUEUE", delay_ms=5))
    assert remote_jobs.claim_due(9, run_id=run.id) == []
    sim.execute("UPDATE remote_jobs SET next_poll_at = now()")
    assert len(remote_jobs.claim_due(9, run_id=run.id)) == 1
    assert (row(job.id).polls, row(job.id).last_status) == (1, "IN_QUEUE")


def test_the_claim_of_a_dead_poller_ends():
    run = held_run(1)
    live_job(run, 1)
    assert len(remote_jobs.claim_due(9, run_id=run.id)) == 1
    sim.execute("UPDATE remote_jobs SET polled_until = now() - interval '1 s'")
    assert len(remote_jobs.claim_due(9, run_id=run.id)) == 1


def test_the_poll_of_a_dead_fork_does_not_delay_the_runs_next_owner():
    run = held_run(1)
    live_job(run, 1)
    assert len(remote_jobs.claim_due(9, run_id=run.id)) == 1
    sim.expire(run.id)
    # A webhook or another job makes the run claimable while this job is live.
    sim.execute("UPDATE runs SET state = 'ready'")
    newer = sim.claim(Stage.OCR)
    remote_posts.note_interrupted(newer)
    assert len(remote_jobs.claim_due(9, run_id=run.id)) == 1


def test_maintenance_leaves_jobs_to_the_fork_that_holds_the_run():
    run = held_run(2)
    live_job(run, 1)
    assert remote_jobs.claim_due(9) == []
    leases.release(run)
    assert len(remote_jobs.claim_due(9)) == 1


def test_a_job_to_be_cancelled_is_polled_by_maintenance_at_once():
    run = held_run(1)
    job = live_job(run, 1)
    remote_jobs.note_poll(job.id, PollNote(next_in=3600))
    cancel(run)
    assert [job.cancel_wanted for job in remote_jobs.claim_due(9)] == [True]


def test_a_late_poll_does_not_revive_an_ended_job():
    run = held_run(1)
    job = live_job(run, 1)
    settle(job, read_page(1))
    remote_jobs.note_poll(job.id, PollNote(next_in=0, status="IN_PROGRESS", adopted_id="another"))
    assert (row(job.id).state, row(job.id).remote_id) == ("ended", job.remote_id)


def test_a_run_becomes_claimable_when_its_lost_post_is_due():
    run = held_run(1)
    job_id = open_job(run, 1)
    remote_posts.note_lost(job_id, "cut")
    remote_jobs.leave_to_maintenance(run)
    assert remote_posts.wake_for_reposts(60) == 0
    sim.execute("UPDATE remote_jobs SET lost_at = now() - interval '61 s'")
    assert remote_posts.wake_for_reposts(60) == 1
    assert sim.claim(Stage.OCR).id == run.id


# Webhooks.


def test_a_webhooks_id_is_a_hint_until_it_is_confirmed():
    run = held_run(1)
    job_id = open_job(run, 1, token="secret")
    remote_posts.note_lost(job_id, "cut")
    remote_jobs.note_poll(job_id, PollNote(next_in=3600))
    assert remote_jobs.hint(token_digest("secret"), "named")
    assert (row(job_id).remote_id, row(job_id).hinted_id) == (None, "named")
    assert len(remote_jobs.claim_due(9, run_id=run.id)) == 1
    remote_jobs.note_poll(job_id, PollNote(next_in=1, adopted_id="named"))
    assert (row(job_id).remote_id, row(job_id).state) == ("named", "live")


def test_a_webhook_for_a_repeated_post_names_the_job_of_the_post_that_repeats_it():
    """Both posts have one request key, so the handlers do the same work."""
    run = held_run(1)
    first = open_job(run, 1, token="first")
    remote_posts.note_lost(first, "cut")
    remote_posts.free_lost(run, first)
    again = open_job(run, 1, token="again", reason=PostReason.LOST_ANSWER)
    remote_posts.note_lost(again, "cut")
    assert remote_jobs.hint(token_digest("first"), "named")
    assert (row(first).hinted_id, row(again).hinted_id) == (None, "named")


@pytest.mark.parametrize("blame", [None, *Blame])
def test_a_fork_that_only_follows_jobs_is_not_charged(blame):
    run = held_run(2)
    job = live_job(run, 1, 2)
    for _ in range(12):
        if blame is None:
            sim.expire(run.id)
        else:
            assert leases.release_crashed("worker", run_row(run.id).lease_task, sim.lease(), blame)
        found = run_row(run.id)
        assert (found.state, found.crashes, found.expiries) == ("remote", 0, 0)
        assert row(job.id).state == "live"
        sim.execute("UPDATE runs SET state = 'ready'")
        sim.claim(Stage.OCR)


@pytest.mark.parametrize("posted", [(), (1,)])
def test_a_fork_with_a_page_that_no_job_has_is_charged(posted):
    run = held_run(2)
    if posted:
        live_job(run, *posted)
    leases.release_crashed("worker", run_row(run.id).lease_task, sim.lease())
    assert (run_row(run.id).state, run_row(run.id).crashes) == ("ready", 1)


def test_pages_are_exhausted_by_posts_of_any_reason_but_not_by_refused_ones():
    run = held_run(2)
    reasons = [PostReason.FIRST, PostReason.SECOND_TRY, PostReason.EXPIRED]
    for reason in reasons:
        settle(live_job(run, 1, reason=reason), again(1))
        remote_posts.note_refused(open_job(run, 1, reason=reason), "429")
    assert remote_posts.exhausted_pages(run, 4) == {}
    assert remote_posts.exhausted_pages(run, 3) == {1: reasons}


def test_an_abandoned_post_is_lost_and_one_in_progress_is_not():
    run, other = held_run(1), held_run(1)
    abandoned, in_progress = open_job(run, 1), open_job(other, 1)
    leases.release(run)
    assert remote_posts.note_abandoned() == 1
    assert (row(abandoned).state, row(in_progress).state) == ("lost", "submitting")


def test_a_partly_settled_post_gets_new_cuts_and_a_whole_one_does_not():
    run = held_run(5)
    second = {n: PostReason.SECOND_TRY for n in range(1, 6)}
    settle(live_job(run, 1, 2, 3), again(1), read_page(2), again(3), reasons=second)
    settle(live_job(run, 4, 5), again(4), again(5), reasons=second)
    assert remote_posts.free_pages(run) == [
        FreePages(PostReason.SECOND_TRY, (1, 3)),
        FreePages(PostReason.SECOND_TRY, (4, 5), as_before=True),
    ]


def test_the_id_of_the_post_has_precedence_over_a_webhooks_id():
    run = held_run(1)
    job = live_job(run, 1)
    remote_jobs.note_poll(job.id, PollNote(next_in=1, adopted_id="another"))
    assert row(job.id).remote_id == job.remote_id


def test_a_webhook_during_a_poll_triggers_another_poll():
    run = held_run(1)
    job = live_job(run, 1, token="secret")
    assert len(remote_jobs.claim_due(9, run_id=run.id)) == 1
    remote_jobs.hint(token_digest("secret"), "named")
    remote_jobs.note_poll(job.id, PollNote(next_in=3600, status="IN_PROGRESS"))
    assert len(remote_jobs.claim_due(9, run_id=run.id)) == 1
    remote_jobs.note_poll(job.id, PollNote(next_in=3600, status="IN_PROGRESS"))
    assert remote_jobs.claim_due(9, run_id=run.id) == []


def test_only_the_unconfirmed_id_is_forgotten_not_a_newer_one():
    run = held_run(1)
    job_id = open_job(run, 1, token="secret")
    remote_jobs.hint(token_digest("secret"), "newer")
    remote_jobs.forget_hint(job_id, "older")
    assert row(job_id).hinted_id == "newer"
    remote_jobs.forget_hint(job_id, "newer")
    assert row(job_id).hinted_id is None


def test_an_unknown_token_changes_nothing():
    run = held_run(1)
    job = live_job(run, 1, token="secret")
    before = row(job.id)
    assert not remote_jobs.hint(token_digest("guess"), "named")
    assert row(job.id) == before
    settle(job, read_page(1))
    ended = row(job.id)
    assert remote_jobs.hint(token_digest("secret"), "named")
    assert row(job.id) == ended


# Documents.


def test_a_deleted_document_stays_until_its_last_job_has_ended(settings):
    store = DocumentStore(get_settings())
    store.check()
    run = held_run(2)
    jobs = [live_job(run, 1), live_job(run, 2)]
    deletion.delete(run.document_id)
    for job in jobs:
        assert document_rows.removable_documents(10) == []
        assert deletion.remove_deleted(store) == 0
        settle(job, outcome=JobOutcome.CANCELLED)
    assert deletion.remove_deleted(store) == 1
    assert sim.rows("SELECT 1 FROM remote_jobs") == []
