"""The CPU OCR server's HTTP interface, with an engine that the test controls."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import uvicorn
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from rag_service.config.options import CpuOcrOptions
from tests.waiting import eventually
from workers.servers.cpu_ocr.cpu_ocr_server import create_app
from workers.servers.cpu_ocr.ocr_engine import TextBox

SETTINGS = CpuOcrOptions(
    host="127.0.0.1", port=5002, engine="tiny", threads=1, max_pixels=10_000, max_body_bytes=50_000
)
MODEL = "pp-ocrv6-tiny"


class ControlledEngine:
    """Reads the same line from every picture; each read waits until the test releases it."""

    def __init__(self) -> None:
        self.text = "twelve bytes"
        self.reads = 0
        self.go = threading.Semaphore(0)
        self.broken = False

    def read(self, picture: bytes) -> list[TextBox]:
        self.reads += 1
        assert self.go.acquire(timeout=30)
        if self.broken:
            raise RuntimeError("out of order")
        return [TextBox(0, 0, 100, 10, self.text, 0.99)]


class Served:
    """The application behind a real socket."""

    def __init__(self, engine: ControlledEngine) -> None:
        self.engine = engine
        self.app = create_app(SETTINGS, engine)
        self.server = uvicorn.Server(uvicorn.Config(self.app, log_level="error"))
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread = threading.Thread(target=asyncio.run, args=(self.serve(),))
        self.http = httpx.Client(base_url=self.url, timeout=30)

    async def serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.server.serve([self.socket])

    def drain(self) -> None:
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.app.state.queue.drain)

    def metric(self, name: str, **labels: str) -> float:
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        wanted = {"model_name": MODEL, **labels}
        return sum(
            s.value for f in families for s in f.samples if s.name == name and s.labels == wanted
        )

    def running_and_waiting(self) -> tuple[float, float]:
        """The numbers of running and waiting requests."""
        running, waiting = "vllm:num_requests_running", "vllm:num_requests_waiting"
        return self.metric(running), self.metric(waiting)

    def ask(self, **changes: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={**question(), **changes})


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served(ControlledEngine())
    served.thread.start()
    eventually(lambda: served.http.get("/health").status_code == 200)
    yield served
    served.engine.go.release(100)
    served.server.should_exit = True
    served.http.close()
    served.thread.join(30)
    assert not served.thread.is_alive()


def uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def png(width: int = 56, height: int = 28) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), "white").save(buffer, "PNG")
    return buffer.getvalue()


def question(url: str | None = None) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": url or uri(png())}}
    text = {"type": "text", "text": "Text Recognition:"}
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": [image, text]}],
        "max_tokens": 8192,
        "temperature": 0.0,
        "repetition_penalty": 1.1,
    }


def test_an_answer_has_all_fields_that_clients_read(served: Served) -> None:
    served.engine.go.release()
    answer = served.ask().json()
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "twelve bytes"}
    assert choice["finish_reason"] == "stop"
    # 2 patches of 28 x 28 and 17 bytes of prompt; 12 bytes of text.
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    assert answer["model"] == MODEL
    assert answer["id"]
    assert answer["created"] > 0
    assert served.metric("vllm:request_success_total", finished_reason="stop") == 1
    assert served.metric("cpu_ocr_pages_total", turned="0") == 1


def test_max_tokens_cuts_between_characters_with_reason_length(served: Served) -> None:
    served.engine.text = "äöüß€"
    served.engine.go.release()
    answer = served.ask(max_tokens=2).json()
    assert answer["choices"][0]["message"]["content"] == "äöüß"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 2
    assert served.metric("vllm:request_success_total", finished_reason="length") == 1


def test_the_models_are_listed(served: Served) -> None:
    (model,) = served.http.get("/v1/models").json()["data"]
    assert model["id"] == MODEL
    assert model["max_model_len"] > 32768


BIG = uri(png(101, 100))
NO_IMAGE = [{"role": "user", "content": [{"type": "text", "text": "Text Recognition:"}]}]
TWO = [{"role": "user", "content": question()["messages"][0]["content"] * 2}]


def with_url(url: str) -> dict[str, Any]:
    return {"messages": question(url)["messages"]}


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        (with_url("http://127.0.0.1/page.png"), 400, "invalid_image"),
        (with_url("data:image/png;base64,not*base64"), 400, "invalid_image"),
        (with_url(uri(b"no picture at all")), 400, "invalid_image"),
        (with_url(uri(png()[:-30])), 400, "invalid_image"),
        (with_url(BIG), 400, "invalid_image"),
        ({"messages": NO_IMAGE}, 400, "invalid_image_count"),
        ({"messages": TWO}, 400, "invalid_image_count"),
        ({"messages": []}, 400, "invalid_request"),
        ({"max_tokens": -1}, 400, "invalid_request"),
        ({"max_tokens": 0}, 400, "invalid_request"),
        ({"n": 2}, 400, "invalid_request"),
        ({"stream": True}, 400, "stream_unsupported"),
        ({"model": "another-model"}, 404, "model_not_found"),
        ({"user": "x" * 60_000}, 413, "request_too_large"),
    ],
)
def test_a_bad_request_is_refused_as_openai_does(
    served: Served, changes: dict[str, Any], status: int, code: str
) -> None:
    response = served.ask(**changes)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code)
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert served.engine.reads == 0


def test_broken_json_and_unknown_paths_have_the_same_form(served: Served) -> None:
    broken = served.http.post("/v1/chat/completions", content=b"{not json")
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_request")
    assert served.http.get("/v2/none").json()["error"]["code"] == "not_found"
    wrong = served.http.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


def test_an_engine_error_is_a_500_and_the_next_page_is_read(served: Served) -> None:
    served.engine.broken = True
    served.engine.go.release()
    response = served.ask()
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert served.metric("vllm:request_success_total", finished_reason="error") == 1
    served.engine.broken = False
    served.engine.go.release()
    assert served.ask().status_code == 200


def test_one_runs_and_the_rest_wait(served: Served) -> None:
    with ThreadPoolExecutor(3) as clients:
        answers = [clients.submit(served.ask) for _ in range(3)]
        eventually(lambda: served.running_and_waiting() == (1, 2) and served.engine.reads == 1)
        served.engine.go.release(3)
        assert [a.result().status_code for a in answers] == [200, 200, 200]
    eventually(lambda: served.running_and_waiting() == (0, 0))


def hang_up_after_sending(served: Served) -> socket.socket:
    body = json.dumps(question()).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    client = socket.create_connection(served.socket.getsockname())
    client.sendall(head.encode() + body)
    return client


def test_a_page_of_a_client_that_leaves_the_queue_is_not_read(served: Served) -> None:
    with ThreadPoolExecutor(1) as clients:
        first = clients.submit(served.ask)
        eventually(lambda: served.metric("vllm:num_requests_running") == 1)
        gone = hang_up_after_sending(served)
        eventually(lambda: served.metric("vllm:num_requests_waiting") == 1)
        gone.close()
        eventually(lambda: served.metric("vllm:num_requests_waiting") == 0)
        served.engine.go.release(2)
        assert first.result().status_code == 200
    assert served.ask().status_code == 200
    assert served.engine.reads == 2
    assert served.metric("vllm:request_success_total", finished_reason="abort") == 1


def test_a_client_that_leaves_while_its_page_is_read_frees_the_engine(served: Served) -> None:
    gone = hang_up_after_sending(served)
    eventually(lambda: served.engine.reads == 1)
    gone.close()
    # Two rounds of the server's loop: the first reads the closed connection, the second cancels.
    assert served.metric("vllm:num_requests_running") == 1
    assert served.metric("vllm:num_requests_running") == 1
    served.engine.go.release(2)
    assert served.ask().status_code == 200
    assert served.metric("vllm:request_success_total", finished_reason="abort") == 1


def test_a_draining_server_finishes_the_page_in_progress_and_refuses_the_queue(
    served: Served,
) -> None:
    with ThreadPoolExecutor(2) as clients:
        running = clients.submit(served.ask)
        eventually(lambda: served.engine.reads == 1)
        waiting = clients.submit(served.ask)
        eventually(lambda: served.metric("vllm:num_requests_waiting") == 1)
        served.drain()
        assert waiting.result().status_code == 503
        assert served.http.get("/health").status_code == 503
        served.engine.go.release()
        assert running.result().status_code == 200
