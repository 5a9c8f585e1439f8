"""The command `probe` against simulated servers and the real CPU server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulated_batch import REPORT, SERIAL, Rates
from benchmarks.simulated_server import GaugeNames, SimulatedServer
from rag_service.config.loader import get_settings
from tests.fakes.ocr_server import FakeOcrServer, Reply, Request
from tests.net import free_port
from tests.processes import Programs
from tests.serving import start_cpu_server
from workers.servers.cpu_ocr.ocr_engine import model_name

SMALL = replace(REPORT, slots=4)
QUICK = ("--dpi", "50", "--seconds", "0.3", "--answers", "4")


@contextmanager
def simulated(rates: Rates, gauges: GaugeNames, scale: float) -> Iterator[tuple[str, Any]]:
    """A server on an event loop of its own."""
    loop = asyncio.new_event_loop()
    server = SimulatedServer(rates, gauges, scale=scale)
    listener = loop.run_until_complete(server.listen())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        listener.close()
        loop.close()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rag_service.cli.main", "probe", *arguments]


def probe(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), env=os.environ | env, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip


def objects(done: subprocess.CompletedProcess[str]) -> tuple[list[dict], dict]:
    assert done.returncode == 0, done.stderr
    *steps, findings = map(json.loads, done.stdout.splitlines())
    return steps, findings


@pytest.mark.parametrize("gauges", [GaugeNames.VLLM, GaugeNames.NONE])
def test_a_serialising_server_is_recognised_and_not_flooded(
    gauges: GaugeNames,
) -> None:
    with simulated(SERIAL, gauges, 80) as (url, server):
        steps, findings = objects(probe(url, "--json", *QUICK))
    assert steps[-1]["in_flight"] <= 4
    assert (findings["batches"], findings["verdict"]) == (False, "serialising")
    assert findings["ending"] == "serialises"
    assert findings["slots"] == (1 if gauges is GaugeNames.VLLM else None)
    assert server.counts.left <= steps[-1]["in_flight"], "only those open at the end"


def test_a_batching_server_fills_its_slots(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    with simulated(SMALL, GaugeNames.SGLANG, 160) as (url, _):
        steps, findings = objects(probe(url, "--json", "--plot", str(plot), *QUICK))
    assert [step["in_flight"] for step in steps[:4]] == [1, 2, 4, 8]
    assert (findings["batches"], findings["slots"], findings["slots_stated"]) == (True, 4, True)
    assert findings["verdict"] == "saturated"
    assert findings["throughput"]["in_flight"] >= 4
    assert steps[-1]["running"] > 3
    assert plot.read_text().count("<circle") == 2 * len(steps)


def test_slots_that_nobody_states_are_seen_where_requests_wait() -> None:
    with simulated(SMALL, GaugeNames.VLLM, 80) as (url, _):
        done = probe(url, *QUICK, "--seconds", "0.8", "--most", "8")
    assert done.returncode == 0, done.stderr
    assert "The server batches; 4 slots, beyond which requests waited." in done.stdout
    assert done.stdout.startswith("in flight\tpages/s")
    assert "GLMOCR_PIPELINE_MAX_WORKERS=" in done.stdout


def test_an_interrupt_prints_what_is_known() -> None:
    with simulated(SMALL, GaugeNames.NONE, 40) as (url, _):
        program = subprocess.Popen(
            command(url, "--json", *QUICK), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert program.stdout is not None
        first = json.loads(program.stdout.readline())
        program.send_signal(signal.SIGINT)
        rest, complaint = program.communicate(timeout=30)
    assert program.returncode == 130
    assert first["in_flight"] == 1
    assert json.loads(rest.splitlines()[-1])["ending"] == "interrupted"
    assert "Traceback" not in complaint


def test_an_error_under_load_ends_it_with_what_went_well() -> None:
    with FakeOcrServer() as server:
        server.default = Reply(delay=0.05)

        def fail_when_four_are_open(_request: Request) -> None:
            if server.alive() >= 4:
                server.default = Reply(503)

        server.on_request = fail_when_four_are_open
        steps, findings = objects(probe(server.url, "--json", *QUICK))
    assert [step["in_flight"] for step in steps] == [1, 2, 4]
    assert (findings["ending"], findings["verdict"]) == ("error", "overloaded")
    assert findings["throughput"]["in_flight"] == 2
    assert "503" in findings["error"]


@pytest.mark.parametrize(("reply", "status"), [(503, 3), (401, 2), (400, 1)])
def test_a_server_that_answers_no_page(reply: int, status: int) -> None:
    with FakeOcrServer() as server:
        server.default = Reply(reply)
        done = probe(server.url, *QUICK)
    assert (done.returncode, str(reply) in done.stderr) == (status, True)
    assert (done.stdout, "Traceback" in done.stderr) == ("", False)


def test_an_answer_that_never_comes_ends_a_step() -> None:
    with simulated(replace(SERIAL, serial=(500, 500)), GaugeNames.NONE, 1) as (url, _):
        done = probe(url, *QUICK, "--max-latency", "0.5")
    assert done.returncode == 1
    assert "--max-latency" in done.stderr


def test_exit_status_of_what_is_no_server_for_us() -> None:
    assert probe(f"http://127.0.0.1:{free_port()}").returncode == 3
    with simulated(SMALL, GaugeNames.NONE, 80) as (url, _):
        other = probe(url, "--model", "nobody")
        assert (other.returncode, "'nobody'" in other.stderr) == (2, True)
    assert probe(url, "--plot", "/no/such/folder/plot.svg").returncode == 2
    wrong = probe("ftp://example.com")
    assert (wrong.returncode, "ftp://example.com" in wrong.stderr) == (2, True)


@pytest.mark.parametrize(
    ("path", "wrong", "status"),
    [("/elsewhere", {}, 404), ("", {"models_status": 404}, 404), ("", {"key": "another"}, 401)],
)
def test_what_answers_otherwise_is_told_in_words_of_the_command(
    path: str, wrong: dict[str, Any], status: int
) -> None:
    with FakeOcrServer() as server:
        for name, value in wrong.items():
            setattr(server, name, value)
        done = probe(server.url + path)
    assert done.returncode == 2
    assert f"HTTP {status}; check the URL, or the key (GLMOCR_API_KEY)" in done.stderr
    assert "GLMOCR_BASE_URL" not in done.stderr


@pytest.mark.parametrize("text", ["", " \n"])
def test_empty_answers_are_told(text: str) -> None:
    with FakeOcrServer() as server:
        server.default = Reply(text=text, delay=0.05)
        steps, findings = objects(probe(server.url, "--json", *QUICK, "--most", "1"))
    assert steps[0]["empty"] == steps[0]["answers"] > 0
    assert findings["empty_answers"] == findings["all_answers"] == steps[0]["answers"]


def test_the_cpu_server_answers_every_page(tmp_path: Path) -> None:
    with Programs(os.environ, tmp_path) as programs:
        url = start_cpu_server(programs)
        bounds = ("--dpi", "50", "--seconds", "0.1", "--answers", "1", "--most", "2")
        steps, findings = objects(
            probe(url, *bounds, "--model", model_name(get_settings().cpu_ocr.engine), "--json")
        )
    # Whether it batches is a matter of time, which one answer a step on a busy machine cannot tell.
    assert "batches" in findings
    assert [step["error"] for step in steps] == [None] * len(steps)
