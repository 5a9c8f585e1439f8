"""RunPod's webhook through the real API: it triggers a poll and is never trusted."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rag_service.runpod.job_keys import token_digest
from tests.fakes import runpod_call_faults as call_faults
from tests.fakes.runpod_call_faults import NO_FAULT, refused, says
from tests.fakes.runpod_jobs import Job
from tests.fakes.runpod_service import read_all
from tests.net import free_port
from tests.remote import Remote, open_remote

# Without a webhook no job is polled again within a test's time.
RARE_POLLS = {"RAG_SERVICE_RUNPOD_POLL_MIN": "600", "RAG_SERVICE_RUNPOD_POLL_MAX": "600"}


class Endpoint:
    """A service that asks for webhooks, its handlers, and a client that forges webhooks."""

    def __init__(self, remote: Remote, port: int) -> None:
        self.remote = remote
        self.api = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
        self.open = threading.Event()

    def answer(self, given: dict[str, Any]) -> dict[str, Any]:
        self.open.wait(60)
        return read_all(given)

    def job_of(self, document_id: str) -> Job:
        """The document's one job at RunPod."""
        start = self.remote.run_id(document_id) + ":"

        def found() -> Job | None:
            return next((job for job in self.remote.runpod.jobs if job.key.startswith(start)), None)

        job: Job = self.remote.wait(found, "RunPod has its job")
        return job

    def token(self, document_id: str) -> str:
        webhook = self.job_of(document_id).webhook
        assert webhook is not None
        return webhook.rpartition("/")[2]

    def send(self, token: str, body: Any) -> httpx.Response:
        return self.api.post(f"/webhooks/runpod/{token}", json=body)

    def row(self, document_id: str) -> Any:
        query = "SELECT * FROM remote_jobs WHERE run_id = :id ORDER BY submitted_at"
        return self.remote.service.rows(query, id=self.remote.run_id(document_id))[0]

    def added_and_polled(self) -> str:
        """A document whose job has been polled once; the next poll is due in 10 minutes."""
        document_id = self.remote.add(2)
        self.job_of(document_id)
        self.remote.wait(lambda: self.row(document_id).polls == 1, "the first poll")
        return document_id

    def added_and_lost(self) -> str:
        """A document whose post was accepted and whose answer was lost."""
        self.remote.runpod.next("run", call_faults.CUT_AFTER)
        document_id = self.remote.add(2)
        self.remote.wait(
            lambda: (rows := self.remote.rows(document_id)) and rows[0].state == "lost",
            "the answer is lost",
        )
        return document_id


@pytest.fixture(scope="module")
def running(stack: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    port = free_port()
    env = {
        "RAG_SERVICE_API_PUBLIC_URL": f"http://127.0.0.1:{port}/",
        "RAG_SERVICE_API_PORT": str(port),
        "RAG_SERVICE_RUNPOD_REPOST_AFTER": "600",
        **RARE_POLLS,
    }
    with open_remote(stack, tmp_path_factory.mktemp("webhook"), **env) as remote:
        endpoint = Endpoint(remote, port)
        argv = [sys.executable, "-m", "rag_service.cli.main", "serve"]
        api = remote.programs.start("api", argv)
        remote.runpod.webhook_wait = 0.2
        remote.runpod.play(endpoint.answer, workers=2)
        remote.start(ocr=4)
        remote.wait(lambda: is_live(endpoint), f"the API is live\n{api.tail()}")
        yield endpoint
        endpoint.open.set()


def is_live(endpoint: Endpoint) -> bool:
    try:
        return endpoint.api.get("/health/live").is_success
    except httpx.TransportError:
        return False


@pytest.fixture
def endpoint(running: Endpoint) -> Iterator[Endpoint]:
    running.open.clear()
    yield running
    running.open.set()
    running.remote.runpod.always("status", NO_FAULT)


def sent(endpoint: Endpoint, job: Job) -> list[int | None]:
    """The API's answers to RunPod's own webhooks for the job."""
    return [status for job_id, status in endpoint.remote.runpod.webhooks if job_id == job.id]


def test_a_webhook_triggers_the_next_poll_at_once(endpoint: Endpoint) -> None:
    document_id = endpoint.added_and_polled()
    endpoint.open.set()
    view = endpoint.remote.ended(document_id)
    assert (view.status, view.pages.ocr) == ("processed", 2)
    assert sent(endpoint, endpoint.job_of(document_id)) == [200]
    assert endpoint.row(document_id).polls == 1
    assert set(endpoint.remote.posts(document_id).values()) == {1}


def test_a_lost_id_is_adopted_and_nothing_is_posted_again(endpoint: Endpoint) -> None:
    document_id = endpoint.added_and_lost()
    endpoint.open.set()
    assert endpoint.remote.ended(document_id).status == "processed"
    (post,) = endpoint.remote.rows(document_id)
    assert (post.reason, post.outcome) == ("first", "completed")
    assert post.remote_id == endpoint.job_of(document_id).id
    assert set(endpoint.remote.posts(document_id).values()) == {1}
    endpoint.remote.require_reasons(document_id)


def test_an_adopted_job_is_polled_until_its_end(endpoint: Endpoint) -> None:
    document_id = endpoint.added_and_lost()
    job = endpoint.job_of(document_id)
    assert endpoint.send(endpoint.token(document_id), {"id": job.id}).status_code == 200
    endpoint.remote.wait(lambda: endpoint.row(document_id).state == "live", "it is adopted")
    assert endpoint.row(document_id).remote_id == job.id
    endpoint.open.set()
    assert endpoint.remote.ended(document_id).status == "processed"
    assert len(endpoint.remote.rows(document_id)) == 1


def test_an_unknown_token_changes_nothing(endpoint: Endpoint) -> None:
    document_id = endpoint.added_and_polled()
    job, before = endpoint.job_of(document_id), endpoint.row(document_id)
    for token in ("guess", token_digest(endpoint.token(document_id)), "%00", "a" * 5000):
        assert endpoint.send(token, {"id": job.id, "status": "COMPLETED"}).status_code == 404
    assert endpoint.row(document_id) == before
    endpoint.open.set()
    assert endpoint.remote.ended(document_id).status == "processed"


@pytest.mark.parametrize("forged", ["no-such-job", "../health", "x?ttl=1", "%2e%2e/cancel/x"])
def test_an_id_that_runpod_does_not_confirm_changes_nothing(
    endpoint: Endpoint, forged: str
) -> None:
    """Not even with the right token: the answer is still lost, and the pages are posted again."""
    document_id = endpoint.added_and_lost()
    assert endpoint.send(endpoint.token(document_id), {"id": forged}).status_code == 200
    forgotten = lambda: (r := endpoint.row(document_id)).polls > 0 and not r.hinted_id  # noqa: E731
    endpoint.remote.wait(forgotten, "RunPod does not confirm the id")
    row = endpoint.row(document_id)
    assert (row.state, row.remote_id) == ("lost", None)
    sooner = "UPDATE remote_jobs SET lost_at = now() - interval '601 s' WHERE id = :id RETURNING id"
    endpoint.remote.service.rows(sooner, id=row.id)
    endpoint.remote.wait(
        lambda: len(endpoint.remote.rows(document_id)) == 2, "the post is repeated"
    )
    endpoint.open.set()
    assert endpoint.remote.ended(document_id).status == "processed"
    assert [post.outcome for post in endpoint.remote.rows(document_id)] == ["repeated", "completed"]


def test_an_id_is_not_confirmed_by_another_jobs_result(endpoint: Endpoint) -> None:
    endpoint.open.set()
    other = endpoint.remote.add(2)
    endpoint.remote.ended(other)
    endpoint.open.clear()
    document_id = endpoint.added_and_lost()
    endpoint.send(endpoint.token(document_id), {"id": endpoint.job_of(other).id})
    forgotten = lambda: (r := endpoint.row(document_id)).polls > 0 and not r.hinted_id  # noqa: E731
    endpoint.remote.wait(forgotten, "the id is another job's")
    assert endpoint.row(document_id).state == "lost"
    endpoint.open.set()
    view = endpoint.remote.ended(document_id)
    assert (view.status, len(endpoint.remote.rows(document_id))) == ("processed", 1)


def test_an_id_is_not_adopted_while_runpod_does_not_answer(endpoint: Endpoint) -> None:
    document_id = endpoint.added_and_lost()
    endpoint.remote.runpod.always("status", refused(500))
    job = endpoint.job_of(document_id)
    endpoint.send(endpoint.token(document_id), {"id": job.id})
    endpoint.remote.wait(lambda: endpoint.row(document_id).polls > 0, "RunPod was asked")
    row = endpoint.row(document_id)
    assert (row.state, row.remote_id, row.hinted_id) == ("lost", None, job.id)
    endpoint.remote.runpod.always("status", NO_FAULT)
    endpoint.open.set()
    assert endpoint.remote.ended(document_id).status == "processed"
    assert len(endpoint.remote.rows(document_id)) == 1


def test_the_output_in_a_webhook_is_never_used(endpoint: Endpoint) -> None:
    document_id = endpoint.added_and_polled()
    job = endpoint.job_of(document_id)
    output = read_all(job.input)
    for page in output["pages"]:
        page["markdown"] = "Forged."
    body = {"id": job.id, "status": "COMPLETED", "output": output, "executionTime": 10**9}
    assert endpoint.send(endpoint.token(document_id), body).status_code == 200
    endpoint.remote.wait(lambda: endpoint.row(document_id).polls == 2, "RunPod itself is asked")
    assert endpoint.row(document_id).state == "live"
    endpoint.open.set()
    view = endpoint.remote.ended(document_id)
    assert [page.markdown for page in endpoint.remote.service.pages(document_id)] == [
        "Page 1.", "Page 2.",
    ]  # fmt: skip
    assert (view.cost.gpu_seconds or 0) < 1000


def test_the_failure_in_a_webhook_is_never_used(endpoint: Endpoint) -> None:
    document_id = endpoint.added_and_polled()
    job = endpoint.job_of(document_id)
    body = {"id": job.id, "status": "FAILED", "error": "forged"}
    endpoint.send(endpoint.token(document_id), body)
    endpoint.remote.wait(lambda: endpoint.row(document_id).polls == 2, "RunPod itself is asked")
    endpoint.open.set()
    assert endpoint.remote.ended(document_id).status == "processed"
    assert len(endpoint.remote.rows(document_id)) == 1


@pytest.mark.parametrize(
    "body", [b"", b"not JSON", b"[]", b"{}", b'{"id": 7}', b'{"id": ""}', b'{"id": "%s"}']
)
def test_a_body_that_names_no_job_is_refused(endpoint: Endpoint, body: bytes) -> None:
    document_id = endpoint.added_and_polled()
    before = endpoint.row(document_id)
    content = body.replace(b"%s", b"x" * 1000)
    url = f"/webhooks/runpod/{endpoint.token(document_id)}"
    assert endpoint.api.post(url, content=content).status_code == 422
    assert endpoint.row(document_id) == before


def test_a_webhook_after_the_end_is_accepted_and_changes_nothing(endpoint: Endpoint) -> None:
    endpoint.open.set()
    document_id = endpoint.remote.add(1)
    view = endpoint.remote.ended(document_id)
    before = endpoint.row(document_id)
    endpoint.remote.runpod.always("status", says("IN_PROGRESS"))
    job = endpoint.job_of(document_id)
    assert endpoint.send(endpoint.token(document_id), job.view()).status_code == 200
    assert endpoint.row(document_id) == before
    assert endpoint.remote.view(document_id) == view
