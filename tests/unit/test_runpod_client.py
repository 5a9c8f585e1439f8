"""The RunPod client with a server on loopback: each kind of answer has its exception."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from rag_service.config.loader import load_settings
from rag_service.errors import ConfigurationError
from rag_service.runpod.runpod_client import (
    BodyRefused,
    EndpointHealth,
    EndpointRefused,
    JobNotFound,
    JobReport,
    JobStatus,
    LostAnswer,
    NotAccepted,
    PollFailed,
    RunPodClient,
    Unreachable,
)
from tests.fakes.loopback import Answer, Loopback, Request

KEY, ENDPOINT = "a-key", "ep"
HTML = Answer(200, b"<!doctype html><title>Sign in</title>", {"Content-Type": "text/html"})


class Server:
    """Answers every request with `answer` and records the requests."""

    def __init__(self) -> None:
        self.answer = Answer.json({})
        self.delay = 0.0
        self.asked: list[Request] = []
        self.loopback = Loopback(self._answer)

    async def _answer(self, request: Request) -> Answer:
        self.asked.append(request)
        await asyncio.sleep(self.delay)
        return self.answer


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    server = Server()
    with server.loopback:
        yield server


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    running.asked.clear()
    yield running
    running.answer, running.delay = Answer.json({}), 0.0


def settings(**changes: Any) -> Any:
    values = {"api_key": KEY, "connect_timeout": 2, "request_timeout": 2, **changes}
    shipped = load_settings().runpod
    return type(shipped).model_validate(shipped.model_dump() | values)


def ask(server: Server, call: Callable[[RunPodClient], Any], **changes: Any) -> Any:
    async def asking() -> Any:
        base = f"{server.loopback.url}/v2/"
        async with RunPodClient(settings(**changes), base_url=base, endpoint_id=ENDPOINT) as client:
            return await call(client)

    return asyncio.run(asking())


def run(server: Server, **changes: Any) -> str:
    remote_id: str = ask(server, lambda client: client.run(b'{"input":{}}'), **changes)
    return remote_id


def status(server: Server, remote_id: str = "job-1", **changes: Any) -> JobReport:
    report: JobReport = ask(server, lambda client: client.status(remote_id), **changes)
    return report


# Posting.


def test_a_post_contains_the_key_and_the_unchanged_body(server: Server) -> None:
    server.answer = Answer.json({"id": "job-1", "status": "IN_QUEUE"})
    assert run(server) == "job-1"
    (request,) = server.asked
    assert (request.method, request.path) == ("POST", f"/v2/{ENDPOINT}/run")
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert request.headers["content-type"] == "application/json"
    assert request.body == b'{"input":{}}'


@pytest.mark.parametrize(
    ("code", "error"),
    [
        *[(code, EndpointRefused) for code in (401, 403, 404)],
        *[(code, BodyRefused) for code in (400, 413, 422)],
        *[(code, LostAnswer) for code in (302, 408, 409, 500, 502, 503, 504, 507)],
        (429, NotAccepted),
    ],
)
def test_an_error_of_a_post_contains_runpods_message(
    server: Server, code: int, error: type[Exception]
) -> None:
    # Only a success makes a job, even if an error contains an id.
    server.answer = Answer.json({"id": "job-1", "error": "because of that"}, code)
    with pytest.raises(error, match=f"{code}.*because of that"):
        run(server)


@pytest.mark.parametrize(
    "answer",
    [
        HTML,
        Answer(200, b""),
        Answer(200, b'{"id": "job-1", "sta'),
        Answer(200, b"\xff\xfe"),
        Answer(200, b"{}", {"Content-Encoding": "gzip"}),
        Answer.json({"status": "IN_QUEUE"}),
        Answer.json({"id": ""}),
        Answer.json({"id": None}),
        Answer.json({"id": 7}),
        Answer.json(["job-1"]),
        Answer.json("job-1"),
        Answer(200, b'{"id": "job-1"}', cut="whole"),
        Answer(200, b'{"id": "job-1"}', cut="half"),
    ],
)
def test_an_answer_without_an_id_is_a_lost_answer(server: Server, answer: Answer) -> None:
    server.answer = answer
    with pytest.raises(LostAnswer):
        run(server)
    assert len(server.asked) == 1


def test_an_answer_after_the_time_out_is_lost(server: Server) -> None:
    server.answer, server.delay = Answer.json({"id": "job-1"}), 1.0
    with pytest.raises(LostAnswer):
        run(server, request_timeout=0.2)
    assert len(server.asked) == 1


def test_a_refused_connection_makes_no_job(server: Server) -> None:
    server.loopback.refuse()
    try:
        with pytest.raises(NotAccepted) as caught:
            run(server)
    finally:
        server.loopback.listen()
    assert caught.value.retry_after is None


def test_an_unreachable_endpoint_is_not_a_busy_one(server: Server) -> None:
    """An unreachable endpoint is probed at once; a busy one is asked again later."""
    server.answer = Answer.json({}, 429)
    with pytest.raises(NotAccepted) as busy:
        run(server)
    assert not isinstance(busy.value, Unreachable)
    with pytest.raises(Unreachable, match="cannot be reached"):
        asyncio.run(_post_to("http://no-such-host.invalid/v2"))
    server.loopback.refuse()
    try:
        with pytest.raises(Unreachable, match="cannot be reached"):
            run(server)
    finally:
        server.loopback.listen()


async def _post_to(base: str) -> str:
    async with RunPodClient(settings(), base_url=base, endpoint_id=ENDPOINT) as client:
        return await client.run(b"{}")


@pytest.mark.parametrize(
    ("code", "named"),
    [
        (401, ["RUNPOD_API_KEY"]),
        (403, ["RUNPOD_API_KEY"]),
        (404, ["RUNPOD_ENDPOINT_ID", "RUNPOD_API_BASE"]),
    ],
)
def test_a_refusal_names_the_settings_to_check(server: Server, code: int, named: list[str]) -> None:
    server.answer = Answer.json({"error": "because of that"}, code)
    for call in (run, health):
        with pytest.raises(EndpointRefused) as caught:
            call(server)
        said = caught.value.message
        assert re.findall("RUNPOD_[A-Z_]+", said) == named
        assert f"/v2/{ENDPOINT}" in said
        assert "because of that" in said
        assert KEY not in said


@pytest.mark.parametrize(("header", "seconds"), [("7", 7.0), ("1.5", 1.5), ("soon", None)])
def test_a_429_has_its_retry_after(server: Server, header: str, seconds: float | None) -> None:
    server.answer = Answer(429, b"{}", {"Retry-After": header})
    with pytest.raises(NotAccepted) as posted:
        run(server)
    with pytest.raises(PollFailed) as polled:
        status(server)
    assert (posted.value.retry_after, polled.value.retry_after) == (seconds, seconds)


# Polling.


@pytest.mark.parametrize("word", JobStatus)
def test_every_status_is_known(server: Server, word: JobStatus) -> None:
    server.answer = Answer.json(
        {"id": "job-1", "status": word, "delayTime": 12, "executionTime": 3400.6, "output": [1]}
    )
    report = status(server)
    assert (report.status, report.word, report.output) == (word, word.value, [1])
    assert (report.delay_ms, report.execution_ms) == (12, 3400)
    ends = {JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.TIMED_OUT}
    assert report.pending == (word not in ends)
    assert server.asked[0].path == f"/v2/{ENDPOINT}/status/job-1"


def test_an_unknown_status_is_pending(server: Server) -> None:
    server.answer = Answer.json({"status": "HIBERNATING"})
    report = status(server)
    assert (report.status, report.word, report.pending) == (None, "HIBERNATING", True)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (json.dumps({"error_type": "X", "error_message": "out of memory"}), "out of memory"),
        ("exit code 137", "exit code 137"),
        ({"error_message": "out of memory"}, "out of memory"),
        ({"reason": "odd"}, "{'reason': 'odd'}"),
        (["odd"], "['odd']"),
        ("[1", "[1"),
        (None, None),
    ],
)
def test_the_error_message_is_found_in_each_format(
    server: Server, error: Any, text: str | None
) -> None:
    server.answer = Answer.json({"status": "FAILED", "error": error})
    assert status(server).error == text


@pytest.mark.parametrize(
    "answer",
    [
        HTML,
        Answer(200, b""),
        Answer(200, b'{"status": "COMPL'),
        Answer(200, b"{}", {"Content-Encoding": "gzip"}),
        Answer.json({"id": "job-1"}),
        Answer.json({"status": None}),
        Answer.json({"status": 7}),
        Answer.json([]),
        Answer(200, b'{"status": "IN_PROGRESS", "executionTime": NaN}'),
        Answer(200, b'{"status": "IN_PROGRESS", "delayTime": Infinity}'),
        Answer.json({"status": "IN_PROGRESS", "executionTime": "long"}),
        *[Answer.json({"status": "COMPLETED"}, code) for code in (429, 500, 502, 503, 504)],
        Answer(400, b"<html>Bad request</html>"),
        Answer(200, b'{"status": "COMPLETED"}', cut="whole"),
        Answer(200, b'{"status": "COMPLETED"}', cut="half"),
    ],
)
def test_an_answer_that_is_no_status_is_a_failed_poll(server: Server, answer: Answer) -> None:
    server.answer = answer
    with pytest.raises(PollFailed):
        status(server)


def test_a_silent_server_and_a_closed_one_are_failed_polls(server: Server) -> None:
    server.delay = 1.0
    with pytest.raises(PollFailed):
        status(server, request_timeout=0.2)
    server.loopback.refuse()
    try:
        with pytest.raises(PollFailed):
            status(server)
    finally:
        server.loopback.listen()


@pytest.mark.parametrize(
    ("code", "error"), [(404, JobNotFound), (401, EndpointRefused), (403, EndpointRefused)]
)
def test_an_unknown_job_and_a_refused_key_are_different_errors(
    server: Server, code: int, error: type[Exception]
) -> None:
    server.answer = Answer.json({"status": "COMPLETED"}, code)
    with pytest.raises(error):
        status(server)


@examples(deadline=None, max_examples=25)
@given(st.text("ab/.?#%&: é\\@", min_size=1, max_size=9).filter(lambda id_: id_.strip(".")))
def test_an_id_cannot_change_the_path(running: Server, remote_id: str) -> None:
    """Ids come from outside: from an answer or from a webhook."""
    running.asked.clear()
    running.answer = Answer.json({"status": "IN_QUEUE"})
    status(running, remote_id)
    (request,) = running.asked
    start = f"/v2/{ENDPOINT}/status/"
    assert request.path.startswith(start)
    assert "/" not in request.path.removeprefix(start)
    assert request.query == {}


# Cancel and health.


@pytest.mark.parametrize("code", [200, 404])
def test_cancelling_an_unknown_job_is_no_error(server: Server, code: int) -> None:
    server.answer = Answer.json({}, code)
    ask(server, lambda client: client.cancel("job-1"))
    (request,) = server.asked
    assert (request.method, request.path) == ("POST", f"/v2/{ENDPOINT}/cancel/job-1")


@pytest.mark.parametrize(
    ("code", "error"),
    [(500, PollFailed), (429, PollFailed), (400, PollFailed), (401, EndpointRefused)],
)
def test_a_refused_cancel_raises_an_error(
    server: Server, code: int, error: type[Exception]
) -> None:
    server.answer = Answer.json({}, code)
    with pytest.raises(error):
        ask(server, lambda client: client.cancel("job-1"))


def health(server: Server) -> EndpointHealth:
    found: EndpointHealth = ask(server, lambda client: client.health())
    return found


def test_health_counts_jobs_and_workers(server: Server) -> None:
    server.answer = Answer.json({"jobs": {"inQueue": 3}, "workers": {"idle": 0, "throttled": 2}})
    found = health(server)
    assert found.jobs == {"inQueue": 3}
    assert not found.has_workers


@pytest.mark.parametrize("name", ["idle", "running", "initializing", "ready"])
def test_a_worker_that_starts_counts_as_a_worker(server: Server, name: str) -> None:
    server.answer = Answer.json({"workers": {name: 1}})
    assert health(server).has_workers


@pytest.mark.parametrize("code", [302, 400, 402, 418, 429, 500, 503])
def test_an_error_is_never_taken_for_a_healthy_endpoint(server: Server, code: int) -> None:
    server.answer = Answer.json({"jobs": {}, "workers": {"idle": 1}}, code)
    with pytest.raises(PollFailed, match=str(code)):
        health(server)


@pytest.mark.parametrize("body", [{}, [], {"workers": None}, {"workers": {"idle": "many"}}])
def test_a_malformed_health_answer_counts_nothing(server: Server, body: Any) -> None:
    server.answer = Answer.json(body)
    assert not health(server).has_workers


def test_without_a_key_nothing_is_sent(server: Server) -> None:
    with pytest.raises(ConfigurationError, match="RUNPOD_API_KEY"):
        run(server, api_key=None)
    assert server.asked == []


def test_the_client_follows_no_redirect_with_the_key(server: Server) -> None:
    server.answer = Answer(302, b"", {"Location": f"{server.loopback.url}/elsewhere"})
    with pytest.raises(PollFailed):
        status(server)
    assert len(server.asked) == 1


def test_base_urls_with_and_without_a_slash_are_equal() -> None:
    clients = [
        RunPodClient(settings(), base_url=base, endpoint_id=ENDPOINT)
        for base in ("https://api.example/v2", "https://api.example/v2/")
    ]
    assert {client.url for client in clients} == {"https://api.example/v2/ep"}
