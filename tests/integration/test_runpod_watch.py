"""Maintenance's eye on the RunPod endpoint: when it asks, what it raises, keeps and clears."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from rag_service.config.loader import get_settings
from rag_service.jobs import remote_jobs, remote_posts, server_state
from rag_service.jobs.remote_jobs import JobRow, PollNote
from tests import simulation as sim
from tests.fakes.runpod_service import RunPodService
from tests.fakes.runpod_twists import CUT_BEFORE, HONEST, HTML, Twist, refused
from tests.posts import held_run, new_job, read_page, settle
from workers.remote.endpoint_watch import EndpointWatch

GONE = [refused(500), refused(429), HTML, CUT_BEFORE]


@dataclass
class Watched:
    """An endpoint with one live job that has been polled, and the watch over it."""

    runpod: RunPodService
    job: JobRow
    watch: EndpointWatch = field(default_factory=lambda: EndpointWatch(get_settings()))

    def polled(self, status: str = "IN_QUEUE") -> None:
        remote_jobs.note_poll(self.job.id, PollNote(next_in=900, status=status, error=""))

    def unanswered(self, complaint: str = "no answer") -> None:
        remote_jobs.note_poll(self.job.id, PollNote(next_in=900, error=complaint))

    def age(self, seconds: float) -> None:
        sim.execute(
            "UPDATE remote_jobs SET submitted_at = submitted_at - make_interval(secs => :s)",
            s=seconds,
        )

    def look(self, times: int = 1) -> dict[str, str]:
        for _ in range(times):
            asyncio.run(self.watch.look())
        record = server_state.get(get_settings().page_server or "")
        assert record is not None
        return dict(record.alarms)


@pytest.fixture
def watched(environment: Callable[..., None]) -> Iterator[Watched]:
    with RunPodService() as runpod:
        environment(
            RAG_SERVICE_OCR_TRANSPORT="runpod", RUNPOD_API_BASE=runpod.base_url,
            RUNPOD_ENDPOINT_ID=runpod.endpoint, RUNPOD_API_KEY=runpod.key,
            RAG_SERVICE_OCR_PROBE_INTERVAL="0.000001",
        )  # fmt: skip
        yield Watched(runpod, _live_job(runpod))


def _live_job(runpod: RunPodService) -> JobRow:
    run = held_run(1)
    new = replace(new_job(1, endpoint=runpod.endpoint), base_url=runpod.base_url)
    job_id = remote_posts.open_job(run, new, max_live=64)
    assert job_id is not None
    remote_posts.store_remote_id(job_id, "remote")
    server_state.mark_answered(get_settings().page_server or "")
    return remote_jobs.jobs_of(run.id)[0]


def warnings(caplog: pytest.LogCaptureFixture, name: str) -> int:
    return sum(r.levelno == logging.WARNING and name in r.getMessage() for r in caplog.records)


def test_runpod_is_asked_once_an_interval_however_many_rounds(
    watched: Watched, environment: Callable[..., None]
) -> None:
    watched.look(5)
    assert watched.runpod.count("health") == 5
    environment(RAG_SERVICE_OCR_PROBE_INTERVAL="1000")
    watched.watch = EndpointWatch(get_settings())
    watched.look(5)
    assert watched.runpod.count("health") == 6


def test_an_endpoint_without_live_jobs_is_left_alone(watched: Watched) -> None:
    settle(watched.job, read_page(1))
    assert watched.look(3) == {}
    assert watched.runpod.calls == []


def test_jobs_that_queue_for_long_with_no_worker_are_an_alarm_said_once(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.polled()
    assert watched.look() == {}
    watched.age(get_settings().runpod.no_worker_alarm + 1)
    assert list(watched.look(4)) == ["no_gpu_workers"]
    assert warnings(caplog, "no_gpu_workers") == 1
    watched.runpod.table.seen("a-worker")
    assert watched.look() == {}
    assert watched.runpod.table.workers


@pytest.mark.parametrize("gone", [*GONE, refused(401), refused(404)])
def test_an_alarm_stands_while_nobody_can_be_asked(watched: Watched, gone: Twist) -> None:
    watched.polled()
    watched.age(get_settings().runpod.no_worker_alarm + 1)
    raised = watched.look()
    watched.runpod.always("health", gone)
    assert watched.look(2) == raised
    watched.polled("IN_PROGRESS")
    assert watched.look() == {}, "a job that is at work has a worker, whoever says so"


def test_what_nobody_knows_is_no_alarm_of_missing_workers(watched: Watched) -> None:
    watched.polled()
    watched.age(get_settings().runpod.no_worker_alarm + 1)
    watched.runpod.always("health", refused(500))
    assert "no_gpu_workers" not in watched.look(5)


@pytest.mark.parametrize("gone", GONE)
def test_an_endpoint_that_answers_nothing_is_away_once_that_is_sure(
    watched: Watched, caplog: pytest.LogCaptureFixture, gone: Twist
) -> None:
    watched.unanswered("https://api.example: connection refused")
    watched.runpod.always("health", gone)
    assert watched.look(2) == {}
    alarms = watched.look(4)
    assert alarms == {"ocr_server": "down: https://api.example: connection refused"}
    assert warnings(caplog, "connection refused") == 1
    watched.runpod.always("health", HONEST)
    watched.polled("IN_PROGRESS")
    assert watched.look() == {}
    watched.unanswered()
    watched.runpod.always("health", gone)
    assert watched.look(2) == {}, "it must be sure anew"


def test_polls_that_nobody_answers_are_enough(watched: Watched) -> None:
    watched.unanswered()
    assert watched.look(3) == {"ocr_server": "down: no answer"}


def test_a_health_that_nobody_answers_is_not_while_polls_are(watched: Watched) -> None:
    watched.polled("IN_PROGRESS")
    watched.runpod.refuse()
    assert watched.look(5) == {}


def test_before_the_first_poll_the_health_alone_tells(watched: Watched) -> None:
    watched.runpod.refuse()
    assert list(watched.look(3)) == ["ocr_server"]


def test_two_alarms_stand_beside_each_other(watched: Watched) -> None:
    watched.polled()
    watched.age(get_settings().runpod.no_worker_alarm + 1)
    watched.look()
    watched.unanswered()
    watched.runpod.refuse()
    assert set(watched.look(3)) == {"ocr_server", "no_gpu_workers"}
    settle(watched.job, read_page(1))
    assert watched.look() == {}
