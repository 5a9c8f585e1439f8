"""The command `probe` against simulated servers and the real CPU server.

What it measures depends on time: tests/unit/test_probe_measurement.py checks verdicts in virtual
time, these tests check what does not depend on it.
"""

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

from rag_service.config.loader import get_settings
from tests.fakes.ocr_server import FakeOcrServer, Reply, Request
from tests.net import free_port
from tests.processes import Programs
from tests.serving import start_cpu_server
from tests.simulators.simulated_batch import REPORT, SERIAL, Rates
from tests.simulators.simulated_server import GaugeNames, SimulatedServer
from workers.servers.cpu_ocr.ocr_engine import model_name

SMALL = replace(REPORT, slots=4)
QUICK = ("--dpi", "50", "--seconds", "0.3", "--answers", "4")
ENVIRONMENT = {"OCR_WORKER_CONCURRENCY", "GLMOCR_PIPELINE_MAX_WORKERS"}


@contextmanager
def simulated(rates: Rates, gauges: GaugeNames, scale: float) -> Iterator[tuple[str, Any]]:
    """A server on a separate event loop."""
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


@pytest.mark.parametrize("rates", [SERIAL, SMALL], ids=["serial", "batching"])
@pytest.mark.parametrize("gauges", [*GaugeNames])
def test_steps_and_findings_are_printed_as_json(
    rates: Rates, gauges: GaugeNames, tmp_path: Path
) -> None:
    plot = tmp_path / "plot.svg"
    with simulated(rates, gauges, 80) as (url, server):
        steps, findings = objects(probe(url, "--json", "--plot", str(plot), *QUICK, "--most", "4"))
    numbers = [step["in_flight"] for step in steps]
    assert numbers == [1, 2, 4][: len(steps)]
    assert all(step["answers"] >= 4 for step in steps)
    assert all((step["running"] is None) == (gauges is GaugeNames.NONE) for step in steps)
    if gauges is GaugeNames.SGLANG:
        assert (findings["slots"], findings["slots_stated"]) == (rates.slots, True)
    assert findings["throughput"]["in_flight"] in numbers
    assert findings["settings_for_throughput"].keys() == ENVIRONMENT
    assert server.counts.left <= numbers[-1], "only those open at the end"
    assert plot.read_text().count("<circle") == 2 * len(steps)


def test_people_get_a_table_and_settings() -> None:
    with simulated(SMALL, GaugeNames.VLLM, 80) as (url, _):
        done = probe(url, *QUICK, "--most", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("in flight\tpages/s")
    assert all(f"{name}=" in done.stdout for name in ENVIRONMENT)


def test_an_interrupt_prints_the_steps_so_far() -> None:
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


def test_an_error_under_load_ends_it_with_the_steps_before() -> None:
    with FakeOcrServer() as server:
        server.default = Reply(delay=0.05)

        def fail_when_four_are_open(_request: Request) -> None:
            if server.alive() >= 4:
                server.default = Reply(503)

        server.on_request = fail_when_four_are_open
        steps, findings = objects(probe(server.url, "--json", *QUICK))
    assert [step["in_flight"] for step in steps] == [1, 2, 4]
    assert (findings["ending"], findings["verdict"]) == ("error", "overloaded")
    assert findings["throughput"]["in_flight"] < 4
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


def test_exit_status_for_a_url_that_is_not_a_usable_server() -> None:
    assert probe(f"http://127.0.0.1:{free_port()}").returncode == 3
    with simulated(SMALL, GaugeNames.NONE, 80) as (url, _):
        other = probe(url, "--model", "another")
        assert (other.returncode, "'another'" in other.stderr) == (2, True)
    assert probe(url, "--plot", "/no/such/folder/plot.svg").returncode == 2
    wrong = probe("ftp://example.com")
    assert (wrong.returncode, "ftp://example.com" in wrong.stderr) == (2, True)


@pytest.mark.parametrize(
    ("path", "wrong", "status"),
    [("/elsewhere", {}, 404), ("", {"models_status": 404}, 404), ("", {"key": "another"}, 401)],
)
def test_an_unexpected_answer_names_the_commands_own_options(
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
def test_empty_answers_are_counted(text: str) -> None:
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
