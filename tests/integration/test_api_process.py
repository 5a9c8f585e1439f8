"""The service as a process: starts, refuses to start, ends on a signal."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import closing

import httpx
import pytest

SERVE = (
    "from rag_service.api.app import serve; from rag_service.config.loader import get_settings; "
)
SERVE += "serve(get_settings())"


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def start(settings):
    """Start `serve` with extra environment; it is killed after the test at the latest."""
    processes = []

    def start(**environment: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE],
            env={**os.environ, **environment},
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def wait_until_live(process: subprocess.Popen, port: int) -> None:
    while process.poll() is None:
        try:
            httpx.get(f"http://127.0.0.1:{port}/health/live")
        except httpx.TransportError:
            continue
        return
    pytest.fail(process.stderr.read())


def test_it_ends_cleanly_on_a_signal_with_an_open_event_stream(start, make_pdf):
    port = free_port()
    process = start(RAG_SERVICE_API_PORT=str(port))
    wait_until_live(process, port)
    url = f"http://127.0.0.1:{port}"
    added = httpx.post(f"{url}/documents", files={"file": make_pdf("a")})
    with httpx.stream("GET", f"{url}{added.headers['location']}/events") as stream:
        lines = stream.iter_lines()
        assert next(lines) == "event: progress"
        process.send_signal(signal.SIGTERM)
        assert list(lines)
    assert process.wait(timeout=60) == 0


def test_it_refuses_to_listen_beyond_loopback_without_a_key(start):
    process = start(RAG_SERVICE_API_HOST="0.0.0.0", RAG_SERVICE_API_KEY="")
    _, complaint = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "api.key" in complaint


def test_it_reports_that_its_address_is_in_use(start):
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        process = start(RAG_SERVICE_API_PORT=str(listener.getsockname()[1]))
        _, complaint = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "address already in use" in complaint
