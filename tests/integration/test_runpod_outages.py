"""RunPod unreachable or misconfigured: what waits, what health reports, and how it ends."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rag_service.config.loader import get_settings
from rag_service.monitoring import readiness
from rag_service.monitoring.readiness import Fault
from tests.fakes.runpod_call_faults import NO_FAULT, refused
from tests.fakes.runpod_service import read_all
from tests.remote import Remote, open_remote

# Waits so long that a test which needed one would not end.
LONG_WAITS = {
    "RAG_SERVICE_RETRY_WAITS": "600,600,600,600,600",
    "RAG_SERVICE_RUNPOD_POLL_WINDOW": "600",
    "RAG_SERVICE_RUNPOD_MAX_PAGES_PER_JOB": "1",
}


class Endpoint:
    """The service, its RunPod, and handlers that hold every job until they may answer."""

    def __init__(self, remote: Remote) -> None:
        self.remote, self.runpod = remote, remote.runpod
        self.open = threading.Event()
        # A run whose jobs are answered at once.
        self.answered_run = ""

    def answer(self, given: dict[str, Any]) -> dict[str, Any]:
        while (
            not self.open.is_set() and given["request_key"].partition(":")[0] != self.answered_run
        ):
            time.sleep(0.02)
        return read_all(given)

    def fault(self, beginning: str) -> str:
        """Wait until health reports a fault of RunPod that begins so; return it."""

        def found() -> str | None:
            return next((one for one in faults() if one.startswith(beginning)), None)

        message: str = self.remote.wait(found, f"health reports {beginning}")
        return message

    def parked(self, document_id: str) -> None:
        waits = lambda: self.remote.view(document_id).waiting_for == "ocr_server"  # noqa: E731
        self.remote.wait(waits, "the document waits for RunPod")

    def logged(self, text: str) -> int:
        return sum(program.text.count(text) for program in self.remote.programs.all)


def faults() -> list[str]:
    """The messages of /health/ready about the server that reads pages."""
    found: list[Fault] = readiness.processing_faults(get_settings())
    return [fault.message for fault in found if fault.name == "ocr_server"]


@pytest.fixture(scope="module")
def running(stack: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with open_remote(stack, tmp_path_factory.mktemp("outages"), **LONG_WAITS) as remote:
        endpoint = Endpoint(remote)
        remote.runpod.play(endpoint.answer, workers=6)
        remote.start(ocr=4)
        yield endpoint
        endpoint.open.set()


@pytest.fixture
def endpoint(running: Endpoint) -> Iterator[Endpoint]:
    """Before and after each test RunPod works and no run is active."""
    running.open.clear()
    yield running
    running.runpod.listen()
    for call in ("run", "status", "health"):
        running.runpod.always(call, NO_FAULT)
    running.open.set()
    active = "SELECT 1 FROM runs WHERE state NOT IN ('processed', 'failed', 'cancelled')"
    running.remote.wait(lambda: not running.remote.service.rows(active), "all runs have ended")
    running.remote.wait(lambda: not faults(), "RunPod works again")


def test_an_unreachable_runpod_is_noticed_at_the_first_post(endpoint: Endpoint) -> None:
    endpoint.runpod.refuse()
    document_id = endpoint.remote.add(1)
    endpoint.parked(document_id)
    assert endpoint.runpod.base_url in endpoint.fault("down: ")
    assert [post.outcome for post in endpoint.remote.rows(document_id)] == ["refused"]
    assert endpoint.logged("WARNING workers.run_loop") == 1
    assert endpoint.logged("(GLMOCR_BASE_URL) is not used") == 1, "logged by one of three processes"
    endpoint.open.set()
    endpoint.runpod.listen()
    assert endpoint.remote.ended(document_id).status == "processed"
    assert faults() == []


def test_an_endpoint_that_runpod_does_not_know_stays_misconfigured(endpoint: Endpoint) -> None:
    """Probes do not clear the fault, and no document is posted to test it."""
    for call in ("run", "health"):
        endpoint.runpod.always(call, refused(404, "endpoint not found"))
    document_id = endpoint.remote.add(1)
    endpoint.parked(document_id)
    message = endpoint.fault("misconfigured: ")
    assert "RUNPOD_ENDPOINT_ID" in message
    assert "RUNPOD_API_BASE" in message
    asked = endpoint.runpod.count("health")
    states: set[str] = set()

    def probed() -> bool:
        states.update(message.partition(":")[0] for message in faults() or ["ready"])
        return endpoint.runpod.count("health") > asked + 4

    endpoint.remote.wait(probed, "it is probed several times")
    assert states == {"misconfigured"}
    assert len(endpoint.remote.rows(document_id)) == 1


def test_a_refused_key_is_named_in_health(endpoint: Endpoint) -> None:
    endpoint.runpod.always("run", refused(401))
    endpoint.runpod.always("health", refused(401))
    endpoint.parked(endpoint.remote.add(1))
    assert "RUNPOD_API_KEY" in endpoint.fault("misconfigured: ")


def test_a_key_refused_for_polls_is_logged_once(endpoint: Endpoint) -> None:
    document_id = endpoint.remote.add(2)
    endpoint.remote.live(document_id, 2)
    for call in ("status", "health"):
        endpoint.runpod.always(call, refused(401))
    assert "RUNPOD_API_KEY" in endpoint.fault("misconfigured: ")
    assert endpoint.logged("RunPod refuses polls") == 1


def test_unanswered_polls_are_an_outage_that_is_logged_once(endpoint: Endpoint) -> None:
    remote = endpoint.remote
    document_id = remote.add(1)
    remote.live(document_id)
    remote.wait(lambda: remote.view(document_id).waiting_for == "remote_job", "it is posted")
    assert remote.view(document_id).status == "ocr", "a fork still follows it"
    before = endpoint.logged("WARNING workers.remote.endpoint_watch")
    endpoint.runpod.refuse()
    endpoint.fault("down: ")
    logged = lambda: endpoint.logged("WARNING workers.remote.endpoint_watch") - before  # noqa: E731
    remote.wait(lambda: logged() == 1, "maintenance warns")
    endpoint.runpod.listen()
    remote.wait(lambda: not faults(), "the fault is cleared")
    assert logged() == 1
    endpoint.open.set()
    assert remote.ended(document_id).status == "processed"
    assert set(remote.posts(document_id).values()) == {1}


def test_pages_of_a_cancelled_document_have_no_error(endpoint: Endpoint) -> None:
    remote = endpoint.remote
    document_id = remote.add(2)
    remote.live(document_id, 2)
    assert remote.service.cancel(document_id)
    ended = lambda: {post.state for post in remote.rows(document_id)} == {"ended"}  # noqa: E731
    remote.wait(ended, "its jobs are cancelled")
    assert {post.outcome for post in remote.rows(document_id)} == {"cancelled"}
    pages = remote.service.pages(document_id)
    assert [(page.status, page.error) for page in pages] == [("not_read", None)] * 2
    view = remote.view(document_id)
    assert (view.status, view.pages.failed) == ("cancelled", 0)


def test_a_document_with_nothing_to_post_passes_its_trial_to_another(
    endpoint: Endpoint,
) -> None:
    """It would be chosen to try RunPod, but its jobs are all live and may stay so for long."""
    remote = endpoint.remote
    follower = remote.add(2)
    remote.live(follower, 2)
    endpoint.runpod.refuse()
    waiting = remote.add(1)
    endpoint.parked(waiting)
    (worker,) = (program for program in remote.programs.all if program.name == "ocr")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    remote.service.rows(
        "UPDATE runs SET state = 'ready', epoch = 0 WHERE id = :id RETURNING id",
        id=remote.run_id(follower),
    )
    endpoint.answered_run = remote.run_id(waiting)
    endpoint.runpod.listen()
    remote.programs.all.remove(worker)
    remote.programs.wait_ready(remote.programs.start_worker("ocr", 4))
    assert remote.ended(waiting).status == "processed"
    assert remote.view(follower).latest_run.status in {"ocr", "remote"}
