"""A broker that answers with errors is waited for, as one that does not answer."""

import base64
import json
import signal
import time
import uuid

import pytest
import redis

from rag_service.config.loader import get_settings
from rag_service.monitoring import readiness
from rag_service.states import Stage
from tests.fakes.own_broker import OwnBroker
from tests.service import Scan, open_service

_SECONDS = 1.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with OwnBroker(tmp_path_factory.mktemp("broker")) as broker:
        yield broker


@pytest.fixture(scope="module")
def service(stack, broker, tmp_path_factory):
    servers = stack | {"REDIS_URL": broker.url}
    with open_service(servers, tmp_path_factory.mktemp("service")) as service:
        service.maintenance = service.programs.start_maintenance()
        service.workers = [service.programs.start_worker(s, 2) for s in ("prepare", "ocr")]
        service.programs.wait_ready(*service.workers)
        yield service


# `make chaos` has all states.
STATES = [
    OwnBroker.read_only,
    OwnBroker.out_of_memory,
    OwnBroker.another_password,
    OwnBroker.wrong_type,
]


def test_errors_of_the_broker_end_no_process_and_lose_no_document(service, broker):
    processes = (service.maintenance, *service.workers)
    scans = []
    for state in STATES:
        scans.append(Scan(service, 2))
        with state(broker):
            said = readiness.broker_faults(get_settings())
            assert [fault.name for fault in said] == ["broker"], state
            # It is accepted.
            scans.append(Scan(service, 2))
            time.sleep(_SECONDS)
        assert [process.exit_code for process in processes] == [None] * len(processes), state
        # The next state must meet workers that are connected again.
        assert scans[-1].ended().status == "processed"
    assert [one.ended().status for one in scans] == ["processed"] * len(scans)
    assert readiness.broker_faults(get_settings()) == []
    for worker in service.workers:
        assert "The broker answers with an error" in worker.text


def message(**changes):
    """Return a message as Celery sends one, with these parts changed."""
    body = json.dumps([[], {"run_id": "0" * 32}, {}])
    headers = {"lang": "py", "task": "prepare document", "id": str(uuid.uuid4())}
    properties = {
        "delivery_mode": 2, "delivery_tag": str(uuid.uuid4()), "body_encoding": "base64",
        "delivery_info": {"exchange": "", "routing_key": "prepare"},
    }  # fmt: skip
    whole = {
        "body": base64.b64encode(body.encode()).decode(), "content-encoding": "utf-8",
        "content-type": "application/json", "headers": headers, "properties": properties,
    }  # fmt: skip
    return json.dumps(whole | changes)


def encoded(value):
    return base64.b64encode(json.dumps(value).encode()).decode()


MESSAGES = {
    "no JSON": "this is not JSON",
    "empty": "",
    "no UTF-8": b"\xff\xfe\x00",
    "too deep": "[" * 100_000,
    "a number": "7",
    "null": "null",
    "a list": "[1, 2]",
    "no properties": json.dumps({"body": "x"}),
    "no headers": message(headers=None),
    "empty headers": message(headers={}),
    "headers of another kind": message(headers=[1]),
    "no delivery tag": message(properties={}),
    "body of another kind": message(body=7),
    "body no base64": message(body="%%%"),
    "body no JSON": message(body=base64.b64encode(b"{").decode()),
    "pickle": message(**{"content-type": "application/x-python-serialize"}),
    "unknown content type": message(**{"content-type": "image/png"}),
    "unknown encoding": message(**{"content-encoding": "klingon"}),
    "unknown task": message(headers={"task": "no such task", "id": "1", "lang": "py"}),
    "task of another kind": message(headers={"task": [1], "id": 7, "lang": "py"}),
    "no arguments": message(body=encoded([[], {}, {}])),
    "wrong arguments": message(body=encoded([[1, 2], {"x": 1}, {}])),
    "arguments of another kind": message(body=encoded([7, "x", None])),
    "body of one part": message(body=encoded(7)),
    "wrong time": message(
        headers={"task": "prepare document", "id": "1", "lang": "py", "eta": "x", "expires": "y"}
    ),
    "unknown type": json.dumps({"__type__": "nonsense", "__value__": 1}),
    "huge": message(body=encoded([["x" * 20_000_000], {}, {}])),
}


def test_a_message_that_cannot_be_read_is_dropped_and_the_worker_goes_on(service, broker):
    with redis.Redis.from_url(broker.url) as client:
        for stage in Stage:
            for text in MESSAGES.values():
                client.lpush(stage.value, text)
            client.publish("/0.celery.pidbox", "this is not JSON")
            client.publish("/0.celery.pidbox", "[7]")
        service.programs.wait_until(
            lambda: not any(client.llen(stage.value) for stage in Stage), "they are taken"
        )
        one = Scan(service, 2)
        assert one.ended().status == "processed"
        service.programs.wait_until(lambda: client.hlen("unacked") == 0, "none comes again")
    assert [worker.exit_code for worker in service.workers] == [None, None]
    assert "A message that is not JSON was dropped" in service.workers[0].text


def test_a_worker_stops_in_order_while_the_broker_answers_with_errors(service, broker):
    start = len(service.workers[0].text)
    with broker.read_only():
        met = lambda: "The broker answers" in service.workers[0].text[start:]  # noqa: E731
        service.programs.wait_until(met, "the worker has met it")
        for worker in service.workers:
            worker.signal(signal.SIGTERM)
        assert [worker.wait() for worker in service.workers] == [0, 0]
