"""The CPU OCR server as a separate process, with the real engine, over HTTP."""

from __future__ import annotations

import base64
import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from PIL import Image, ImageDraw, ImageFont

from rag_service.ocr.known_page import WORDS, known_page, known_page_size

LINES = [
    "The harbour master wrote his report",
    "on the evening of the fourth of May.",
    "Nine ships had come in with timber,",
    "two with salt, and one with oranges.",
    "The invoice number is 4711 and the sum",
    "to be paid within thirty days is 250.",
]
RUNNING = 'vllm:num_requests_running{model_name="pp-ocrv6-tiny"} 1.0'
START = (
    "from workers.servers.cpu_ocr.cpu_ocr_server import serve; "
    "from rag_service.config.loader import load_settings; "
    "serve(load_settings())"
)


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    http: httpx.Client

    def read(self, image: Image.Image, **more: Any) -> dict[str, Any]:
        response = self.http.post("/v1/chat/completions", json={**request(image), **more})
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def start() -> Server:
    port = free_port()
    environment = {**os.environ, "RAG_SERVICE_CPU_OCR_PORT": str(port)}
    process = subprocess.Popen([sys.executable, "-c", START], env=environment)
    http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
    for _ in range(2400):
        try:
            if http.get("/health").status_code == 200:
                return Server(process, http)
        except httpx.ConnectError:
            assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    raise AssertionError("the server did not become healthy")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = start()
    yield server
    server.process.terminate()
    assert server.process.wait(30) == 0


def page(lines: list[str]) -> Image.Image:
    image = Image.new("RGB", (1240, 900), "white")
    font = ImageFont.load_default(36)
    for i, line in enumerate(lines):
        ImageDraw.Draw(image).text((120, 120 + 60 * i), line, fill="black", font=font)
    return image


def request(image: Image.Image) -> dict[str, Any]:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    url = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "Text Recognition:"},
    ]
    return {"messages": [{"role": "user", "content": content}]}


def words_found(text: str) -> float:
    wanted = " ".join(LINES).split()
    return sum(word in text.split() for word in wanted) / len(wanted)


@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
def test_a_page_is_read_in_every_orientation(server: Server, degrees: int) -> None:
    choice = server.read(page(LINES).rotate(degrees, expand=True))
    text = choice["message"]["content"]
    assert words_found(text) > 0.9
    assert text.index("harbour") < text.index("timber") < text.index("4711")
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("dpi", [72, 150])
def test_it_reads_the_known_page(server: Server, dpi: int) -> None:
    size = known_page_size(10**9 if dpi > 100 else 0, dpi)
    text = server.read(Image.open(io.BytesIO(known_page(*size))))["message"]["content"]
    assert [word for word in WORDS if word in text] == list(WORDS)


def test_an_empty_page_is_empty_and_ends_with_stop(server: Server) -> None:
    choice = server.read(page([]))
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")


def test_a_low_token_limit_ends_with_length(server: Server) -> None:
    choice = server.read(page(LINES), max_tokens=5)
    assert choice["finish_reason"] == "length"
    assert "The harbour master".startswith(choice["message"]["content"][:18])


def test_many_at_once_are_all_answered(server: Server) -> None:
    with ThreadPoolExecutor(6) as clients:
        choices = list(clients.map(server.read, [page(LINES[i:]) for i in range(6)]))
    assert all(LINES[i].split()[-2] in c["message"]["content"] for i, c in enumerate(choices))


def page_in_progress(server: Server, clients: ThreadPoolExecutor) -> Future[dict[str, Any]]:
    """Send pages until the server is seen reading one, and return its answer to come."""
    while True:
        answer = clients.submit(server.read, page(LINES))
        while not answer.done():
            if RUNNING in server.http.get("/metrics").text:
                return answer


def test_sigterm_answers_the_page_in_progress_and_exits_cleanly() -> None:
    server = start()
    with ThreadPoolExecutor(1) as clients:
        answer = page_in_progress(server, clients)
        server.process.send_signal(signal.SIGTERM)
        assert words_found(answer.result()["message"]["content"]) > 0.9
    assert server.process.wait(60) == 0


def test_a_second_server_on_the_same_port_ends_with_an_error(server: Server) -> None:
    port = str(server.http.base_url.port)
    environment = {**os.environ, "RAG_SERVICE_CPU_OCR_PORT": port}
    second = subprocess.run(
        [sys.executable, "-c", START], env=environment, capture_output=True, timeout=60
    )
    assert second.returncode == 3
    assert b"address already in use" in second.stderr
