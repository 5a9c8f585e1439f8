"""Samples of an OCR server, the alarm if it is starved, and the alarm's webhook."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from queue import Queue

import pytest
from pydantic import SecretStr

from rag_service.diagnosis.bottleneck import Verdict
from rag_service.jobs import fork_loads, limit_changes, live_workers, server_samples, server_state
from rag_service.monitoring.alarm_webhook import Notifier
from rag_service.monitoring.gauge_sampler import Sampler
from rag_service.ocr.concurrency.changes import ChangeLog, ChangeReason
from rag_service.states import JobOutcome, PageState, Stage
from tests import simulation as sim
from tests.conftest import changed_settings
from tests.posts import held_run, live_job
from tests.simulators.simulated_batch import SERVERS
from tests.simulators.simulated_server import GaugeNames, SimulatedServer
from workers.maintenance import MaintenanceLoop

RATES = replace(SERVERS["report"], slots=4)


class Simulated:
    """A simulated server with its own event loop."""

    def __init__(self, gauges: GaugeNames) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server = SimulatedServer(RATES, gauges)
        self._listener = self._call(self.server.listen())
        self.url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    def take(self, requests: int) -> None:
        """Let other clients send that number of requests."""

        async def arrive() -> None:
            for _ in range(requests):
                self.server.arrive(lambda: None)

        self._call(arrive())

    def stop(self) -> None:
        async def close() -> None:
            self._listener.close()

        self._call(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)


@pytest.fixture
def simulated():
    started = []

    def start(gauges: GaugeNames = GaugeNames.VLLM) -> Simulated:
        started.append(Simulated(gauges))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def receiver():
    """A webhook receiver: answers 503 to the first post, then 200; `posts` has the bodies."""
    posts: Queue[dict] = Queue()
    statuses = iter([503])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posts.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(next(statuses, 200))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Write nothing to the tests' output."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    server.posts = posts
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def sampler(settings):
    """A sampler of the server at a URL, for which a sample is always due."""

    def make(url: str, **sections) -> Sampler:
        ocr = {"base_url": url, **sections.pop("ocr", {})}
        options = {"sample_every": 1e-9, "starved_after": 100.0}
        changed = changed_settings(settings, ocr=ocr, occupancy=options, **sections)
        # Diagnose the last minute, however often a test takes samples.
        kept = changed.occupancy.model_copy(update={"sample_every": 15.0})
        made = Sampler(changed, Notifier(changed.notify, wait=0.01))
        made._settings = changed.model_copy(update={"occupancy": kept})
        return made

    return make


def take_sample(sampler: Sampler):
    """Take a sample and return it with its diagnosis."""
    sampler._sampled_at = float("-inf")
    sampler.sample_if_due()
    [newest] = server_samples.latest(60)
    return newest


def age(seconds: float) -> None:
    """Make all samples older."""
    sim.execute("UPDATE server_samples SET at = at - make_interval(secs => :s)", s=seconds)


def starve(sampler: Sampler) -> None:
    """Let pages wait that no fork sends, for longer than occupancy.starved_after."""
    sim.ready_run(*[PageState.PENDING] * 9)
    for _ in range(9):
        take_sample(sampler)
        age(15)
    assert take_sample(sampler).diagnosis.verdict is Verdict.STARVED


@pytest.mark.parametrize("gauges", [GaugeNames.VLLM, GaugeNames.SGLANG])
def test_a_servers_gauges_are_stored_with_what_forks_have_open(simulated, sampler, gauges):
    server = simulated(gauges)
    server.take(6)
    fork_loads.report("a-fork", server.url, 6, 6.5)
    sim.ready_run(PageState.PENDING)
    seen = take_sample(sampler(server.url)).sample
    assert (seen.running + seen.waiting, seen.in_flight, seen.limit) == (6, 6, 6.5)
    assert seen.pages_waiting == 2
    assert (seen.slots == 4) is (gauges is GaugeNames.SGLANG)


def test_unreported_slots_are_the_most_that_ran_while_others_waited(simulated, sampler):
    server = simulated()
    server.take(9)
    watch = sampler(server.url)
    running = take_sample(watch).sample.running
    assert running == take_sample(watch).sample.slots == 4


def test_slots_from_the_settings_apply_if_the_server_reports_none(simulated, sampler):
    server = simulated()
    watch = sampler(server.url)
    known = watch._settings.occupancy.model_copy(update={"slots": 48})
    watch._settings = watch._settings.model_copy(update={"occupancy": known})
    assert take_sample(watch).sample.slots == 48


def test_a_server_without_gauges_is_sampled_too(simulated, sampler):
    server = simulated(GaugeNames.NONE)
    fork_loads.report("a-fork", server.url, 3, 20.0)
    sim.ready_run(PageState.PENDING)
    seen = take_sample(sampler(server.url))
    assert (seen.sample.running, seen.sample.slots, seen.sample.in_flight) == (None, None, 3)
    assert seen.diagnosis.verdict is Verdict.STARVED


def test_maintenance_takes_samples_beside_its_rounds(simulated, settings):
    server = simulated()
    maintenance = MaintenanceLoop(
        changed_settings(settings, ocr={"base_url": server.url}), threading.Event()
    )
    maintenance.round()
    maintenance._running["occupancy"].result(30)
    maintenance._threads.shutdown()
    assert [judged.sample.url for judged in server_samples.latest(60)] == [server.url]


def test_a_server_that_is_out_is_not_starved(simulated, sampler):
    server = simulated()
    sim.ready_run(PageState.PENDING)
    server_state.mark_out(server.url, "refused", misconfigured=False)
    seen = take_sample(sampler(server.url)).diagnosis
    assert seen.verdict is Verdict.UNKNOWN
    assert "refused" in seen.sentence


def test_gauges_of_an_endpoint_come_from_its_jobs(settings, sampler):
    run = held_run()
    job = live_job(run)
    watch = sampler(
        "http://127.0.0.1:1", ocr={"transport": "runpod"},
        runpod={"api_base": "https://rp.test/v2", "endpoint_id": "e1"},
    )  # fmt: skip
    sim.execute(
        "UPDATE remote_jobs SET base_url = 'https://rp.test/v2', endpoint_id = 'e1', "
        "state = 'ended', outcome = :outcome, ended_at = now(), gauges = "
        """'{"running_mean": 20.5, "waiting_mean": 0.5, "slots": 64}' WHERE id = :id""",
        id=job.id, outcome=JobOutcome.COMPLETED,
    )  # fmt: skip
    seen = take_sample(watch).sample
    assert seen.url == "https://rp.test/v2/e1"
    assert (seen.running, seen.waiting, seen.slots) == (20.5, 0.5, 64)


def test_a_starved_server_raises_one_alarm_that_is_shown_and_cleared(
    simulated, sampler, receiver, caplog, start_api
):
    caplog.set_level(logging.INFO)
    server = simulated()
    address = f"http://127.0.0.1:{receiver.server_port}/hook"
    watch = sampler(server.url, notify={"webhook_url": SecretStr(address)})
    starve(watch)
    take_sample(watch)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len([w for w in warnings if "has been starved since" in w]) == 1
    api = start_api(ocr={"base_url": server.url})
    degraded = {f["name"]: f["message"] for f in api.client.get("/health/ready").json()["degraded"]}
    assert "no fork sends any" in degraded["starved"]
    first, again = receiver.posts.get(timeout=10), receiver.posts.get(timeout=10)
    assert first == again
    assert (first["event"], first["server"]) == ("starved", server.url)
    since = datetime.fromisoformat(first["since"])
    assert server_samples.starvation(server.url).since == since

    sim.execute("UPDATE runs SET state = 'cancelled', finished_at = now()")
    take_sample(watch)
    over = receiver.posts.get(timeout=10)
    assert (over["event"], over["since"]) == ("starved_over", first["since"])
    assert server_samples.starvation(server.url) is None
    degraded = api.client.get("/health/ready").json()["degraded"]
    assert "starved" not in [fault["name"] for fault in degraded]


def test_an_outage_is_posted_once_and_its_end_once(simulated, sampler, receiver, start_api):
    server = simulated()
    address = f"http://127.0.0.1:{receiver.server_port}/hook"
    watch = sampler(server.url, notify={"webhook_url": SecretStr(address)})
    api = start_api(ocr={"base_url": server.url})
    figure = f'rag_service_server_up{{server="{server.url}"}}'
    take_sample(watch)
    assert figure not in api.client.get("/metrics").text
    for message in ("every page is refused: HTTP 400", "every page fails: HTTP 500"):
        server_state.mark_out(server.url, message, misconfigured=False)
        take_sample(watch)
        assert f"{figure} 0.0" in api.client.get("/metrics").text
    server_state.mark_answered(server.url)
    take_sample(watch)
    take_sample(watch)
    assert f"{figure} 1.0" in api.client.get("/metrics").text
    # The receiver refuses the first post.
    first, again, over = (receiver.posts.get(timeout=10) for _ in range(3))
    assert first == again
    assert (first["event"], first["server"]) == ("server_out", server.url)
    assert first["sentence"] == "every page is refused: HTTP 400"
    assert (over["event"], over["since"]) == ("server_out_over", first["since"])
    assert receiver.posts.empty()


def test_slots_from_the_settings_apply_to_a_server_without_gauges(simulated, sampler):
    watch = sampler(simulated(GaugeNames.NONE).url)
    options = watch._settings.occupancy.model_copy(update={"slots": 64})
    watch._settings = watch._settings.model_copy(update={"occupancy": options})
    assert take_sample(watch).sample.slots == 64


def test_time_without_samples_does_not_count_as_starved(simulated, sampler):
    server = simulated()
    watch = sampler(server.url)
    sim.ready_run(PageState.PENDING)
    take_sample(watch)
    age(150)
    take_sample(watch)
    assert server_samples.starvation(server.url) is None


def test_an_unreachable_webhook_does_not_delay_the_alarm(simulated, sampler):
    server = simulated()
    watch = sampler(server.url, notify={"webhook_url": SecretStr("http://127.0.0.1:1/")})
    starve(watch)
    now = server_samples.page_queue().at
    assert server_samples.starvation(server.url).since < now - timedelta(seconds=100)


def test_metrics_servers_and_status_show_the_sample_and_its_diagnosis(
    simulated, sampler, start_api
):
    server = simulated(GaugeNames.SGLANG)
    server.take(3)
    watch = sampler(server.url)
    fork_loads.report("a-fork", server.url, 3, 3.0)
    take_sample(watch)
    api = start_api(ocr={"base_url": server.url})
    text = api.client.get("/metrics").text
    label = f'{{server="{server.url}"}}'
    assert f"rag_service_server_slots{label} 4.0" in text
    assert f"rag_service_server_in_flight{label} 3.0" in text
    assert f'rag_service_server_verdict{{server="{server.url}",verdict="starved"}} 0.0' in text
    [shown] = api.client.get("/servers").json()["servers"]
    assert (shown["url"], shown["latest"]["slots"], shown["samples"]) == (server.url, 4, [])
    take_sample(watch)
    [shown] = api.client.get("/servers", params={"seconds": 60}).json()["servers"]
    assert len(shown["samples"]) == 2
    done = subprocess.run(
        [sys.executable, "-m", "rag_service.cli.main", "status"],
        env=os.environ | {"RAG_SERVICE_URL": api.url},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert server.url in done.stdout
    assert shown["latest"]["sentence"] in done.stdout


def test_metrics_servers_and_status_give_the_reason_for_the_number_in_flight(
    simulated, sampler, start_api
):
    server = simulated(GaugeNames.SGLANG)
    take_sample(sampler(server.url))
    changes = ChangeLog()
    changes.add(10.0, 12.0, ChangeReason.MORE_GAINED)
    limit_changes.add("a-fork", server.url, changes.take())
    changes.add(12.0, 15.0, ChangeReason.TRIED_MORE)
    limit_changes.add("a-fork", server.url, changes.take())
    api = start_api(ocr={"base_url": server.url})
    series = f'limit_changes_total{{reason="more_gained",server="{server.url}"}} 1.0'
    assert series in api.client.get("/metrics").text
    [view] = api.client.get("/servers").json()["servers"]
    assert [change["reason"] for change in view["limit_changes"]] == ["tried_more", "more_gained"]
    lasting = view["limit_changes"][1]
    assert (lasting["old"], lasting["new"], lasting["fork"]) == (10.0, 12.0, "a-fork")
    done = subprocess.run(
        [sys.executable, "-m", "rag_service.cli.main", "status"],
        env=os.environ | {"RAG_SERVICE_URL": api.url},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "10.0 -> 12.0, more_gained (a-fork," in done.stdout


def test_waiting_for_the_memory_guard_is_shown(simulated, sampler, api, make_pdf):
    server = simulated()
    document_id = api.add(make_pdf("a"))
    live_workers.heartbeat("o", Stage.OCR, 8, low_memory=True)
    run = sim.claim()
    sim.plan(run, PageState.PENDING)
    sim.runs.hand_to_ocr(run)
    assert api.get(document_id)["waiting_for"] == "memory_guard"
    assert "memory guard" in take_sample(sampler(server.url)).diagnosis.sentence
    live_workers.heartbeat("o", Stage.OCR, 8)
    assert api.get(document_id)["waiting_for"] == "queue"


@pytest.mark.parametrize(
    "reasons",
    [
        (ChangeReason.STARTED, ChangeReason.BOUND),
        (ChangeReason.BOUND, ChangeReason.STARTED),
        (ChangeReason.DOUBLED, ChangeReason.BOUND, ChangeReason.DOUBLED),
    ],
)
def test_the_newest_change_of_one_report_is_the_first_that_is_shown(settings, reasons):
    changes = ChangeLog()
    for number, reason in enumerate(reasons):
        changes.add(float(number), float(number + 1), reason)
    limit_changes.add("a-fork", "http://127.0.0.1:1", changes.take())
    newest = limit_changes.last_changes("http://127.0.0.1:1")[0]
    assert (newest.reason, newest.new) == (reasons[-1], float(len(reasons)))
