"""The fake RunPod behaves as RunPod's documentation describes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.fakes.loopback import Answer, Loopback, Request
from tests.fakes.runpod_jobs import Job
from tests.fakes.runpod_service import RunPodService, read_all
from tests.waiting import eventually


@pytest.fixture
def service() -> Iterator[RunPodService]:
    with RunPodService() as service:
        yield service


@pytest.fixture
def ask(service: RunPodService) -> Iterator[Callable[..., httpx.Response]]:
    url = f"{service.base_url}/{service.endpoint}"
    headers = {"Authorization": f"Bearer {service.key}"}
    with httpx.Client(base_url=url, headers=headers) as client:
        yield client.request


def body(**more: Any) -> dict[str, Any]:
    return {"input": {"request_key": "k", "pages": [1, 2]}, **more}


def post(service: RunPodService, ask: Callable[..., httpx.Response], **more: Any) -> Job:
    return service.job(ask("POST", "/run", json=body(**more)).json()["id"])


def test_a_job_goes_from_the_queue_to_its_result(service: RunPodService, ask: Any) -> None:
    job = post(service, ask)
    assert ask("GET", f"/status/{job.id}").json() == {"id": job.id, "status": "IN_QUEUE"}
    assert ask("GET", "/health").json()["jobs"]["inQueue"] == 1
    service.play(read_all)
    eventually(lambda: job.final)
    answer = ask("GET", f"/status/{job.id}").json()
    assert [page["page"] for page in answer["output"]["pages"]] == [1, 2]
    assert answer["executionTime"] >= 0


def test_a_wrong_key_and_a_body_over_the_limit_are_refused(
    service: RunPodService, ask: Any
) -> None:
    assert ask("POST", "/run", json=body(), headers={"Authorization": "no"}).status_code == 401
    service.max_body = 1000
    assert ask("POST", "/run", json=body(more="x" * 1000)).status_code == 413
    assert service.jobs == []


def test_a_job_is_unknown_after_its_ttl_and_after_its_retention(
    service: RunPodService, ask: Any
) -> None:
    queued = post(service, ask, policy={"ttl": 200})
    eventually(lambda: ask("GET", f"/status/{queued.id}").status_code == 404)
    service.table.retention = 0.2
    service.play(read_all)
    done = post(service, ask)
    eventually(lambda: ask("GET", f"/status/{done.id}").status_code == 404)
    assert done.status == "COMPLETED"


def test_a_lost_workers_job_is_queued_again_and_then_times_out(
    service: RunPodService, ask: Any
) -> None:
    job = post(service, ask)
    for worker, status in [("a", "IN_QUEUE"), ("b", "TIMED_OUT")]:
        assert service.table.take(worker) is job
        service.table.gone(worker)
        assert job.status == status
    service.table.done("a", job.id, {"output": "late"})
    assert job.output is None


def test_progress_after_the_result_overwrites_it(service: RunPodService, ask: Any) -> None:
    job = post(service, ask)
    service.table.take("a")
    service.table.done("a", job.id, {"output": {"pages": []}})
    service.table.done("a", job.id, {"status": "IN_PROGRESS", "output": "half"})
    answer = ask("GET", f"/status/{job.id}").json()
    assert (answer["status"], answer["output"]) == ("IN_PROGRESS", "half")
    assert "executionTime" in answer


def test_a_cancelled_job_stops_its_worker(service: RunPodService, ask: Any) -> None:
    job = post(service, ask)
    service.table.take("a")
    assert ask("POST", f"/cancel/{job.id}").json()["status"] == "CANCELLED"
    assert service.table.stops("a") == [job.id]


def test_two_live_jobs_of_one_key_are_counted(service: RunPodService, ask: Any) -> None:
    for _ in range(2):
        post(service, ask)
    assert service.table.most_alive["k"] == 2
    assert service.accepted["k"] == 2


def test_a_webhook_is_repeated_until_it_gets_200(service: RunPodService, ask: Any) -> None:
    received: list[dict[str, Any]] = []

    async def answer(request: Request) -> Answer:
        received.append(json.loads(request.body))
        return Answer(200 if len(received) == 3 else 500)

    service.webhook_wait = 0.05
    with Loopback(answer) as caller:
        job = post(service, ask, webhook=f"{caller.url}/hook")
        service.table.finish(job.id, "FAILED", error="boom")
        eventually(lambda: len(service.webhooks) == 3)
    assert received == [job.view()] * 3
    assert [status for _, status in service.webhooks] == [500, 500, 200]
