"""The layout server is killed several times while several processes send it requests."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import psutil
import pytest

from rag_service.config.loader import load_settings
from rag_service.config.options import Settings
from rag_service.layout.layout_client import LayoutClient, readiness
from tests.fakes.page_pictures import paragraphs
from workers.servers.layout.layout_supervisor import LayoutSupervisor

pytestmark = pytest.mark.chaos

CLIENTS, REQUESTS, AT_ONCE, KILLS = 3, 40, 4, 4
# The clients send different pages, so that a wrong answer is noticed.
COUNTS = (0, 1, 3, 4, 5, 6)


def test_every_request_gets_its_own_answer_once(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RAG_SERVICE_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("RAG_SERVICE_OCR_LAYOUT", "regions")
    settings = load_settings()
    supervisor = LayoutSupervisor(settings)
    supervisor.start()
    spawn = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(CLIENTS, mp_context=spawn) as pool:
            clients = [pool.submit(ask, settings, seed) for seed in range(CLIENTS)]
            killed = kill_repeatedly(settings, clients)
            answers = [client.result() for client in clients]
        restarts = supervisor.restarts
    finally:
        supervisor.stop()
    assert killed == KILLS, "the clients were done before all kills"
    assert restarts == KILLS
    for seed, found in enumerate(answers):
        assert found == {request: count_of(seed, request) for request in range(REQUESTS)}


def kill_repeatedly(settings: Settings, clients: list[Future[dict[int, int]]]) -> int:
    """Kill the server while it has requests; return the number of kills."""
    random_times, killed = random.Random(7), 0
    while killed < KILLS and not all(client.done() for client in clients):
        if readiness(settings).ok:
            time.sleep(random_times.uniform(0.1, 0.6))
            for child in psutil.Process().children():
                if "workers.servers.layout.layout_server" in child.cmdline():
                    child.kill()
                    killed += 1
        time.sleep(0.05)
    return killed


def count_of(seed: int, request: int) -> int:
    return COUNTS[(seed + request) % len(COUNTS)]


def ask(settings: Settings, seed: int) -> dict[int, int]:
    """Send pages as a fork does, several at once; return the answer of each request."""
    pages = {count: paragraphs(count) for count in COUNTS}
    found: dict[int, int] = {}

    async def main() -> None:
        slots = asyncio.Semaphore(AT_ONCE)
        async with LayoutClient(settings) as client:

            async def one(request: int) -> None:
                async with slots:
                    layout = await client.find(pages[count_of(seed, request)])
                assert request not in found
                found[request] = len(layout.boxes)

            await asyncio.gather(*map(one, range(REQUESTS)))

    asyncio.run(main())
    return found
