"""The watch over the RunPod endpoint: when it asks, which alarms it raises, keeps and clears."""

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
from tests.fakes.runpod_call_faults import CUT_BEFORE, HTML, NO_FAULT, CallFault, refused
from tests.fakes.runpod_service import RunPodService
from tests.posts import held_run, new_job, read_page, settle
from workers.remote.endpoint_watch import EndpointWatch

NO_ANSWER = [refused(500), refused(429), HTML, CUT_BEFORE]


@dataclass
class Watched:
    """An endpoint with one live job that has been polled, and the watch over it."""

    runpod: RunPodService
    job: JobRow
    watch: EndpointWatch = field(default_factory=lambda: EndpointWatch(get_settings()))

    def polled(self, status: str = "IN_QUEUE") -> None:
        remote_jobs.note_poll(self.job.id, PollNote(next_in=900, status=status, error=""))

    def unanswered(self, message: str = "no answer") -> None:
        remote_jobs.note_poll(self.job.id, PollNote(next_in=900, error=message))

    def age(self, seconds: float) -> None:
        sim.execute(
            "UPDATE remote_jobs SET submitted_at = submitted_at - make_interval(secs => :s)",
            s=seconds,
        )

    def check(self, times: int = 1) -> dict[str, str]:
        for _ in range(times):
            asyncio.run(self.watch.check())
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


def test_runpod_is_asked_once_an_interval(
    watched: Watched, environment: Callable[..., None]
) -> None:
    watched.check(5)
    assert watched.runpod.count("health") == 5
    environment(RAG_SERVICE_OCR_PROBE_INTERVAL="1000")
    watched.watch = EndpointWatch(get_settings())
    watched.check(5)
    assert watched.runpod.count("health") == 6


def test_an_endpoint_without_live_jobs_is_not_asked(watched: Watched) -> None:
    settle(watched.job, read_page(1))
    assert watched.check(3) == {}
    assert watched.runpod.calls == []


def test_queued_jobs_without_a_worker_raise_an_alarm_once(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.polled()
    assert watched.check() == {}
    watched.age(get_settings().runpod.no_worker_alarm + 1)
    assert list(watched.check(4)) == ["no_gpu_workers"]
    assert warnings(caplog, "no_gpu_workers") == 1
    watched.runpod.table.seen("a-worker")
    assert watched.check() == {}
    assert watched.runpod.table.workers


@pytest.mark.parametrize("silence", [*NO_ANSWER, refused(401), refused(404)])
def test_an_alarm_stays_while_runpod_does_not_answer(watched: Watched, silence: CallFault) -> None:
    watched.polled()
    watched.age(get_settings().runpod.no_worker_alarm + 1)
    raised = watched.check()
    watched.runpod.always("health", silence)
    assert watched.check(2) == raised
    watched.polled("IN_PROGRESS")
    assert watched.check() == {}, "a running job proves that there is a worker"


def test_unknown_health_raises_no_alarm_about_workers(watched: Watched) -> None:
    watched.polled()
    watched.age(get_settings().runpod.no_worker_alarm + 1)
    watched.runpod.always("health", refused(500))
    assert "no_gpu_workers" not in watched.check(5)


@pytest.mark.parametrize("silence", NO_ANSWER)
def test_an_endpoint_is_down_after_several_unanswered_checks(
    watched: Watched, caplog: pytest.LogCaptureFixture, silence: CallFault
) -> None:
    watched.unanswered("https://api.example: connection refused")
    watched.runpod.always("health", silence)
    assert watched.check(2) == {}
    alarms = watched.check(4)
    assert alarms == {"ocr_server": "down: https://api.example: connection refused"}
    assert warnings(caplog, "connection refused") == 1
    watched.runpod.always("health", NO_FAULT)
    watched.polled("IN_PROGRESS")
    assert watched.check() == {}
    watched.unanswered()
    watched.runpod.always("health", silence)
    assert watched.check(2) == {}, "the count of unanswered checks starts again"


def test_unanswered_polls_alone_raise_the_alarm(watched: Watched) -> None:
    watched.unanswered()
    assert watched.check(3) == {"ocr_server": "down: no answer"}


def test_unanswered_health_raises_no_alarm_while_polls_are_answered(watched: Watched) -> None:
    watched.polled("IN_PROGRESS")
    watched.runpod.refuse()
    assert watched.check(5) == {}


def test_before_the_first_poll_health_alone_raises_the_alarm(watched: Watched) -> None:
    watched.runpod.refuse()
    assert list(watched.check(3)) == ["ocr_server"]


def test_two_alarms_are_raised_at_the_same_time(watched: Watched) -> None:
    watched.polled()
    watched.age(get_settings().runpod.no_worker_alarm + 1)
    watched.check()
    watched.unanswered()
    watched.runpod.refuse()
    assert set(watched.check(3)) == {"ocr_server", "no_gpu_workers"}
    settle(watched.job, read_page(1))
    assert watched.check() == {}
