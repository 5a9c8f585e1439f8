"""Jobs outlive windows, workers, forks and maintenance: they are resumed, not posted again.

Also jobs of many documents, cancellations and deletions.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import text

from rag_service.config.loader import get_settings
from rag_service.database.engine import begin
from rag_service.documents import deletion
from rag_service.monitoring import readiness
from tests.fakes import runpod_call_faults as call_faults
from tests.fakes.ocr_server import Gate
from tests.fakes.runpod_call_faults import NO_FAULT, CallFault, held, refused
from tests.fakes.runpod_service import read_all
from tests.processes import Program, kill
from tests.remote import Remote, open_remote
from tests.simulation import wait_until_blocked

WINDOW = 1.5
MOST_LIVE = 3
REPEATED = [("first", "repeated"), ("lost_answer", "completed")]


class HeldHandlers:
    """The endpoint's handlers; they end their jobs only while `open` is set."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.fails = False

    def answer(self, given: dict[str, Any]) -> dict[str, Any]:
        self.open.wait(60)
        if self.fails:
            raise RuntimeError("CUDA out of memory")
        return read_all(given)


@pytest.fixture(scope="module")
def running(
    stack: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Remote, HeldHandlers]]:
    env = {
        "RAG_SERVICE_RUNPOD_POLL_WINDOW": str(WINDOW),
        "RAG_SERVICE_RUNPOD_MAX_LIVE_JOBS": str(MOST_LIVE),
        "RAG_SERVICE_RUNPOD_NO_WORKER_ALARM": "1",
        # Long enough for a late id to come first.
        "RAG_SERVICE_RUNPOD_REPOST_AFTER": "4",
    }
    handlers = HeldHandlers()
    with open_remote(stack, tmp_path_factory.mktemp("resume"), **env) as remote:
        remote.runpod.play(handlers.answer, workers=3)
        remote.ocr_worker = remote.start(ocr=2)  # type: ignore[attr-defined]
        yield remote, handlers
        handlers.open.set()


@pytest.fixture
def remote(running: tuple[Remote, HeldHandlers]) -> Iterator[Remote]:
    remote, handlers = running
    handlers.open.set()
    handlers.fails = False
    yield remote
    handlers.open.set()
    for name in ("run", "status", "cancel", "health"):
        remote.runpod.always(name, NO_FAULT)


@pytest.fixture
def handlers(running: tuple[Remote, HeldHandlers], remote: Remote) -> HeldHandlers:
    return running[1]


def ocr_worker(remote: Remote) -> Program:
    worker: Program = remote.ocr_worker  # type: ignore[attr-defined]
    return worker


def restart(remote: Remote, how: signal.Signals) -> None:
    """Replace the ocr worker by a new one."""
    old = ocr_worker(remote)
    if how is signal.SIGKILL:
        old.kill()
    else:
        old.signal(how)
        old.wait()
    new = remote.programs.start_worker("ocr", 2)
    remote.programs.wait_ready(new)
    remote.ocr_worker = new  # type: ignore[attr-defined]


def is_remote(remote: Remote, document_id: str) -> bool:
    run = remote.service.run(document_id)
    return run.state == "remote" and run.lease_worker is None


def outcomes(remote: Remote, document_id: str) -> list[tuple[str, str | None]]:
    return [(post.reason, post.outcome) for post in remote.rows(document_id)]


def require_posted_once(remote: Remote, document_id: str) -> None:
    assert outcomes(remote, document_id) == [("first", "completed")]
    assert set(remote.posts(document_id).values()) == {1}
    remote.require_one_handler(document_id)


# Resuming.


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_job_outlives_five_windows_and_three_workers(
    remote: Remote, handlers: HeldHandlers, how: signal.Signals
) -> None:
    handlers.open.clear()
    document_id = remote.add(3)
    remote.live(document_id)
    for _ in range(3):
        remote.wait(lambda: is_remote(remote, document_id), "the window is over")
        restart(remote, how)
    polls = "SELECT sum(polls) AS polls FROM remote_jobs"
    before = remote.service.rows(polls)[0].polls
    enough = before + 5 * WINDOW / get_settings().runpod.poll_max
    remote.wait(lambda: remote.service.rows(polls)[0].polls >= enough, "five windows of polls")
    assert remote.view(document_id).waiting_for == "remote_job"
    handlers.open.set()
    assert remote.ended(document_id).pages.ocr == 3
    require_posted_once(remote, document_id)


def test_a_worker_killed_while_it_polls_causes_no_post(
    remote: Remote, handlers: HeldHandlers
) -> None:
    handlers.open.clear()
    document_id = remote.add(3)
    remote.live(document_id)
    restart(remote, signal.SIGKILL)
    handlers.open.set()
    assert remote.ended(document_id).pages.ocr == 3
    require_posted_once(remote, document_id)


def test_maintenance_killed_while_it_polls_loses_no_result(
    remote: Remote, handlers: HeldHandlers
) -> None:
    handlers.open.clear()
    document_id = remote.add(2)
    remote.wait(lambda: is_remote(remote, document_id), "the window is over")
    gate = Gate()
    remote.runpod.always("status", held(after=gate))
    handlers.open.set()
    assert gate.arrived.wait(60)
    old = next(p for p in remote.programs.all if p.name == "maintenance" and p.exit_code is None)
    old.kill()
    # Its claim on the poll ends after a minute; the test ends it at once.
    remote.service.rows("UPDATE remote_jobs SET polled_until = NULL RETURNING id")
    remote.runpod.always("status", NO_FAULT)
    gate.open()
    remote.programs.start_maintenance()
    assert remote.ended(document_id).pages.ocr == 2
    require_posted_once(remote, document_id)


# SIGKILL at each step around the post.


def fork_at_runpod(remote: Remote) -> int:
    """The fork that has a connection to RunPod open."""
    port = int(remote.runpod.base_url.rpartition(":")[2].partition("/")[0])
    return remote.programs.fork_to(port)


def kill_during_post(remote: Remote, fault: CallFault, gate: Gate) -> str:
    remote.runpod.next("run", fault)
    document_id = remote.add(2)
    assert gate.arrived.wait(60)
    kill(fork_at_runpod(remote))
    gate.open()
    return document_id


def test_a_fork_killed_before_its_post_is_accepted(remote: Remote) -> None:
    gate = Gate()
    fault = CallFault(accepted=False, cut="whole", before=gate)
    document_id = kill_during_post(remote, fault, gate)
    assert remote.ended(document_id).status == "processed"
    assert outcomes(remote, document_id) == REPEATED
    assert list(remote.accepted(document_id).values()) == [1]
    remote.require_reasons(document_id)


def test_a_fork_killed_between_acceptance_and_answer(remote: Remote) -> None:
    gate = Gate()
    document_id = kill_during_post(remote, held(after=gate), gate)
    assert remote.ended(document_id).status == "processed"
    assert outcomes(remote, document_id) == REPEATED
    # Both jobs have one key, so handlers with a volume do the work once.
    assert list(remote.accepted(document_id).values()) == [2]
    remote.require_reasons(document_id)
    remote.require_one_handler(document_id)


@contextmanager
def locked_rows(remote: Remote, document_id: str) -> Iterator[None]:
    """Lock the rows of the document's posts."""
    query = "SELECT 1 FROM remote_jobs WHERE run_id = :id FOR UPDATE"
    with begin() as connection:
        connection.execute(text(query), {"id": remote.run_id(document_id)})
        yield


def test_a_fork_killed_after_the_answer_before_the_id_is_stored(remote: Remote) -> None:
    gate = Gate()
    remote.runpod.next("run", held(after=gate))
    document_id = remote.add(2)
    assert gate.arrived.wait(60)
    fork = fork_at_runpod(remote)
    with locked_rows(remote, document_id):
        gate.open()
        wait_until_blocked()
        kill(fork)
    assert remote.ended(document_id).status == "processed"
    assert outcomes(remote, document_id) == REPEATED
    assert list(remote.accepted(document_id).values()) == [2]
    remote.require_reasons(document_id)


def test_a_fork_killed_after_the_id_is_stored_causes_no_post(
    remote: Remote, handlers: HeldHandlers
) -> None:
    handlers.open.clear()
    document_id = remote.add(2)
    remote.live(document_id)
    for fork in ocr_worker(remote).forks():
        kill(fork)
    handlers.open.set()
    assert remote.ended(document_id).status == "processed"
    require_posted_once(remote, document_id)


def test_a_late_id_is_adopted_by_the_runs_new_owner(remote: Remote, handlers: HeldHandlers) -> None:
    """The old owner has lost the run during its post; its job id is still stored."""
    handlers.open.clear()
    gate = Gate()
    remote.runpod.next("run", held(after=gate))
    document_id = remote.add(2)
    assert gate.arrived.wait(60)
    run_id = remote.run_id(document_id)
    take = (
        "UPDATE runs SET state = 'ready', lease_worker = NULL, lease_task = NULL,"
        " lease_expires_at = NULL WHERE id = :id RETURNING epoch"
    )
    epoch = remote.service.rows(take, id=run_id)[0].epoch
    remote.wait(lambda: remote.service.run(document_id).epoch > epoch, "another fork has the run")
    remote.wait(lambda: remote.rows(document_id)[0].state == "lost", "the post counts as lost")
    gate.open()
    remote.live(document_id)
    handlers.open.set()
    assert remote.ended(document_id).status == "processed"
    require_posted_once(remote, document_id)


# Cancel and delete.


def test_a_cancel_reaches_the_job(remote: Remote, handlers: HeldHandlers) -> None:
    handlers.open.clear()
    document_id = remote.add(2)
    (post,) = remote.live(document_id)
    assert deletion.cancel(document_id)
    assert remote.view(document_id).status == "cancelled"
    remote.wait(
        lambda: remote.runpod.job(str(post.remote_id)).status == "CANCELLED",
        "the job is cancelled on RunPod",
    )
    remote.wait(
        lambda: outcomes(remote, document_id) == [("first", "cancelled")], "it is confirmed"
    )


def test_a_cancel_reaches_a_job_whose_id_comes_late(remote: Remote, handlers: HeldHandlers) -> None:
    handlers.open.clear()
    gate = Gate()
    remote.runpod.next("run", held(after=gate))
    document_id = remote.add(2)
    assert gate.arrived.wait(60)
    deletion.cancel(document_id)
    gate.open()
    remote.wait(
        lambda: outcomes(remote, document_id) == [("first", "cancelled")], "it is cancelled"
    )
    (post,) = remote.rows(document_id)
    assert remote.runpod.job(str(post.remote_id)).status == "CANCELLED"


def test_a_cancel_while_posts_are_refused_leaves_no_job_behind(remote: Remote) -> None:
    """The post was certainly not accepted, so no job waits for an id."""
    remote.runpod.always("run", refused(429, "slow down", "60"))
    document_id = remote.add(2)
    remote.wait(lambda: sum(remote.posts(document_id).values()) == 1, "the post is refused")
    deletion.delete(document_id)
    gone = "SELECT 1 FROM documents WHERE id = :id"
    remote.wait(lambda: not remote.service.rows(gone, id=document_id), "its rows are gone")
    assert remote.service.rows("SELECT 1 FROM remote_jobs WHERE state <> 'ended'") == []


def test_deleted_rows_go_when_the_last_job_has_ended(
    remote: Remote, handlers: HeldHandlers
) -> None:
    handlers.open.clear()
    document_id = remote.add(8)
    posts = remote.live(document_id, 2)
    remote.runpod.next("cancel", call_faults.CUT_BEFORE, call_faults.CUT_BEFORE)
    deletion.delete(document_id)
    gone = "SELECT 1 FROM documents WHERE id = :id"
    remote.wait(lambda: not remote.service.rows(gone, id=document_id), "its rows are gone")
    for post in posts:
        assert remote.runpod.job(str(post.remote_id)).status == "CANCELLED"


# Many documents.


def test_the_endpoint_never_has_more_live_jobs_than_allowed(
    remote: Remote, handlers: HeldHandlers
) -> None:
    handlers.open.clear()
    document_ids = [remote.add(1) for _ in range(MOST_LIVE + 3)]
    live = "SELECT count(*) AS live FROM remote_jobs WHERE state <> 'ended'"
    remote.wait(lambda: remote.service.rows(live)[0].live == MOST_LIVE, "the endpoint is full")
    run_ids = {remote.run_id(document_id) for document_id in document_ids}

    def at_runpod() -> int:
        jobs = [job for job in remote.runpod.jobs if job.key.partition(":")[0] in run_ids]
        return sum(not job.final for job in jobs)

    most, calls = 0, remote.runpod.count("status")

    def watched() -> bool:
        nonlocal most
        most = max(most, at_runpod())
        return remote.runpod.count("status") > calls + 20

    remote.wait(watched, "time has passed")
    handlers.open.set()
    for document_id in document_ids:
        assert remote.ended(document_id).status == "processed"
        require_posted_once(remote, document_id)
    assert most == MOST_LIVE


def test_ten_failing_documents_leave_ten_failed_records(
    remote: Remote, handlers: HeldHandlers
) -> None:
    handlers.fails = True
    document_ids = [remote.add(1) for _ in range(10)]
    views = [remote.ended(document_id) for document_id in document_ids]
    assert [view.status for view in views] == ["failed"] * 10
    for document_id in document_ids:
        runs = "SELECT count(*) AS runs FROM runs WHERE document_id = :id"
        assert remote.service.rows(runs, id=document_id)[0].runs == 1
        assert outcomes(remote, document_id) == [("first", "failed"), ("second_try", "failed")]
        assert sum(remote.posts(document_id).values()) == 2
        remote.require_reasons(document_id)


def test_a_long_document_is_divided_among_all_workers(remote: Remote) -> None:
    document_id = remote.add(155)
    view = remote.ended(document_id, 110)
    assert (view.status, view.pages.ocr) == ("processed", 155)
    posts = remote.rows(document_id)
    assert sorted(page for post in posts for page in post.pages) == list(range(1, 156))
    assert len(posts) == sum(remote.posts(document_id).values()) >= 6
    remote.require_one_handler(document_id)
    start = remote.run_id(document_id)
    workers = {job.takes[0] for job in remote.runpod.jobs if job.key.startswith(start)}
    assert len(workers) == 3
    seconds = sum(post.execution_ms or 0 for post in posts) / 1000
    assert view.cost.gpu_seconds == pytest.approx(seconds, abs=0.001)
    price = get_settings().runpod.usd_per_gpu_second
    assert view.cost.usd == pytest.approx(seconds * price, abs=1e-6)


# Outages.


def parked(remote: Remote, document_id: str) -> None:
    waits = lambda: remote.view(document_id).waiting_for == "ocr_server"  # noqa: E731
    remote.wait(waits, f"{document_id} waits for RunPod")


def faults(remote: Remote) -> dict[str, str]:
    return {fault.name: fault.message for fault in readiness.processing_faults(get_settings())}


@pytest.mark.parametrize("code", [401, 403, 404, 429])
def test_an_endpoint_that_accepts_no_job_parks_the_document(remote: Remote, code: int) -> None:
    remote.runpod.always("run", refused(code))
    remote.runpod.always("health", refused(code))
    document_id = remote.add(1)
    parked(remote, document_id)
    assert ("misconfigured" in faults(remote)["ocr_server"]) == (code != 429)
    remote.runpod.always("run", NO_FAULT)
    remote.runpod.always("health", NO_FAULT)
    assert remote.ended(document_id).status == "processed"
    assert set(outcomes(remote, document_id)[:-1]) == {("first", "refused")}
    assert outcomes(remote, document_id)[-1] == ("first", "completed")
    assert list(remote.accepted(document_id).values()) == [1]
    assert "ocr_server" not in faults(remote)


def test_an_unreachable_runpod_parks_new_documents_and_loses_no_job(
    remote: Remote, handlers: HeldHandlers
) -> None:
    handlers.open.clear()
    posted = remote.add(1)
    remote.live(posted)
    remote.runpod.refuse()
    try:
        waiting = remote.add(1)
        parked(remote, waiting)
    finally:
        remote.runpod.listen()
    handlers.open.set()
    for document_id in (posted, waiting):
        assert remote.ended(document_id).status == "processed"
    require_posted_once(remote, posted)
    assert list(remote.accepted(waiting).values()) == [1]


LOST_TWICE = [("first", "repeated"), ("lost_answer", None)]


@pytest.mark.parametrize("fault", [refused(502), call_faults.failed_after(502)])
def test_a_second_lost_answer_is_not_posted_again(remote: Remote, fault: CallFault) -> None:
    """Neither a probe, a trial, a killed worker nor another document posts its pages."""
    remote.runpod.always("run", fault)
    document_id = remote.add(2)
    remote.wait(lambda: outcomes(remote, document_id) == LOST_TWICE, "two lost answers")
    remote.wait(lambda: is_remote(remote, document_id), "no fork holds the run")
    restart(remote, signal.SIGKILL)
    other = remote.add(1)
    remote.wait(lambda: outcomes(remote, other) == LOST_TWICE, "two more lost answers")
    assert remote.view(document_id).waiting_for == "remote_job"
    alarm = remote.wait(lambda: faults(remote).get("lost_answers"), "the alarm")
    assert "answers to 2 posts were lost" in alarm
    assert "not posted again" in alarm
    assert set(remote.posts(document_id).values()) == {2}
    remote.runpod.always("run", NO_FAULT)
    # Only the end of the ttl decides, because no webhook comes here.
    end_ttl(remote, document_id)
    end_ttl(remote, other)
    for one in (document_id, other):
        assert remote.ended(one).status == "processed"
        assert outcomes(remote, one)[:2] == [("first", "repeated"), ("lost_answer", "expired")]
        assert outcomes(remote, one)[2:] == [("expired", "completed")]
        assert len(remote.posts(one)) == 1
        remote.require_reasons(one)
    remote.wait(lambda: "lost_answers" not in faults(remote), "the alarm ends")


def test_endless_lost_answers_end_after_a_bounded_number_of_posts(remote: Remote) -> None:
    remote.runpod.always("run", call_faults.failed_after(502))
    document_id = remote.add(1)
    for reason in ("first", "expired"):
        twice = [(reason, "repeated"), ("lost_answer", None)]
        remote.wait(lambda: outcomes(remote, document_id)[-2:] == twice, f"lost: {reason}")  # noqa: B023
        end_ttl(remote, document_id)
    view = remote.ended(document_id)
    assert view.error is not None
    assert view.error.code == "pages_failed"
    assert view.error.retryable
    assert "remote_job_expired" in view.error.message
    assert sum(remote.posts(document_id).values()) == 4


def end_ttl(remote: Remote, document_id: str) -> None:
    """Let the time to live of the document's open posts end now."""
    remote.service.rows(
        "UPDATE remote_jobs SET expires_at = now(), next_poll_at = now()"
        " WHERE run_id = :id AND state <> 'ended' RETURNING id",
        id=remote.run_id(document_id),
    )


def test_forks_killed_while_they_follow_jobs_are_not_charged(
    remote: Remote, handlers: HeldHandlers
) -> None:
    """Five kills: three of a fork with a page in progress would fail the document."""
    handlers.open.clear()
    document_id = remote.add(3)
    remote.live(document_id)
    claim = "UPDATE runs SET state = 'ready' WHERE id = :id AND state = 'remote' RETURNING id"
    for _ in range(5):
        remote.service.rows(claim, id=remote.run_id(document_id))
        remote.wait(lambda: remote.service.run(document_id).state == "ocr", "a fork follows")
        for fork in ocr_worker(remote).forks():
            kill(fork)
        remote.wait(lambda: is_remote(remote, document_id), "the run is with its jobs")
        assert remote.service.run(document_id).crashes == 0
    handlers.open.set()
    assert remote.ended(document_id).status == "processed"
    require_posted_once(remote, document_id)


def test_a_key_refused_while_jobs_run_loses_none(remote: Remote, handlers: HeldHandlers) -> None:
    handlers.open.clear()
    document_id = remote.add(1)
    remote.live(document_id)
    remote.runpod.next("status", refused(401))
    remote.wait(lambda: "ocr_server" in faults(remote), "health reports it")
    handlers.open.set()
    # The next poll comes after half a minute; here it is due at once.
    due = "UPDATE remote_jobs SET next_poll_at = now() WHERE run_id = :id RETURNING id"
    remote.service.rows(due, id=remote.run_id(document_id))
    assert remote.ended(document_id).status == "processed"
    require_posted_once(remote, document_id)


def test_queued_jobs_without_a_worker_raise_an_alarm(
    remote: Remote, handlers: HeldHandlers
) -> None:
    no_workers = {"jobs": {"inQueue": 1}, "workers": {"idle": 0, "throttled": 0}}
    remote.runpod.always("health", CallFault(change=lambda _: no_workers))
    remote.runpod.always("status", call_faults.says("IN_QUEUE"))
    document_id = remote.add(1)
    remote.wait(lambda: "no_gpu_workers" in faults(remote), "the alarm")
    assert "no worker" in faults(remote)["no_gpu_workers"]
    remote.runpod.always("health", NO_FAULT)
    remote.runpod.always("status", NO_FAULT)
    assert remote.ended(document_id).status == "processed"
    remote.wait(lambda: "no_gpu_workers" not in faults(remote), "the alarm ends")
