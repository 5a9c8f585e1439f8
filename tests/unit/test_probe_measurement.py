"""A whole probe of simulated servers in virtual time: its steps, findings and verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from rag_service.diagnosis.bottleneck import Verdict
from rag_service.diagnosis.probe_advice import Advice, advise
from rag_service.ocr.ocr_client import PageAnswer
from rag_service.ocr.probe import measurement
from rag_service.ocr.probe.findings import Bounds, Ending, Findings, Step, conclude
from rag_service.ocr.probe.measurement import ProbeLoad, ProbeQuestion, probe
from rag_service.ocr.server_gauges import ServerGauges, parse_gauges
from tests.simulators import virtual_time
from tests.simulators.simulated_batch import FRONT_END, REPORT, SERIAL, Rates
from tests.simulators.simulated_server import GaugeNames, SimulatedServer

SMALL = replace(REPORT, slots=4)
QUESTION = ProbeQuestion(lambda: b"a page", "Text Recognition:", 100)
T = TypeVar("T")


class SimulatedClient:
    """The methods of OcrClient that a probe uses, on a simulated server without HTTP."""

    def __init__(self, server: SimulatedServer) -> None:
        self._server = server

    async def read(self, page: bytes, *, prompt: str, max_tokens: int) -> PageAnswer:
        done = asyncio.get_running_loop().create_future()
        key = self._server.arrive(lambda: done.done() or done.set_result(None))
        try:
            await done
        except asyncio.CancelledError:
            self._server.leave(key)
            raise
        return PageAnswer("text", "stop", 100, 50, "a model", 0.0)

    async def gauges(self) -> ServerGauges | None:
        text = self._server.metrics()
        return None if text is None else parse_gauges(text)

    @property
    def slots(self) -> int | None:
        """Those that the server states, if it does."""
        return (self._server.server_info() or {}).get("max_running_requests")


class Probed:
    """A probe that has ended: its steps, and what follows from them."""

    def __init__(self, steps: list[Step], ending: Ending, slots: int | None, left: int) -> None:
        findings = conclude(steps, ending, slots)
        assert findings is not None
        self.steps, self.findings = steps, findings
        self.advice: Advice = advise(steps, findings, 8)
        self.left = left

    @property
    def verdict(self) -> tuple[Verdict, Ending]:
        return self.advice.verdict, self.findings.ending


async def at_once(work: Callable[..., T], *arguments: Any) -> T:
    """Replaces asyncio.to_thread: a virtual clock does not wait for threads."""
    return work(*arguments)


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Probed]:
    """Probes a simulated server; no second passes and no CPU is used."""
    clock = SimpleNamespace(
        monotonic=lambda: asyncio.get_running_loop().time(), process_time=lambda: 0.0
    )
    monkeypatch.setattr(measurement, "time", clock)
    monkeypatch.setattr(asyncio, "to_thread", at_once)

    async def main(rates: Rates, gauges: GaugeNames, bounds: Bounds) -> Probed:
        server = SimulatedServer(rates, gauges, clock=asyncio.get_running_loop().time)
        client = SimulatedClient(server)
        steps: list[Step] = []
        async with ProbeLoad(client, QUESTION, bounds) as load:
            ending = await probe(
                load, bounds, client.slots, asyncio.Event(),
                starting=lambda _: None, ended=steps.append,
            )  # fmt: skip
        return Probed(steps, ending, client.slots, server.counts.left)

    def run(rates: Rates, gauges: GaugeNames, **bounds: float) -> Probed:
        return virtual_time.run(main(rates, gauges, Bounds(**bounds)))

    return run


def in_flight(findings: Findings) -> int:
    return findings.throughput.in_flight


@pytest.mark.parametrize(("gauges", "last"), [(GaugeNames.VLLM, 2), (GaugeNames.NONE, 4)])
def test_a_serial_server_is_recognised_and_not_flooded(probed, gauges, last) -> None:
    result = probed(SERIAL, gauges)
    assert result.verdict == (Verdict.SERIALISING, Ending.SERIALISES)
    assert result.findings.batches is False
    assert result.findings.slots == (1 if gauges is GaugeNames.VLLM else None)
    assert result.steps[-1].in_flight == last
    assert result.left == last, "only those that were open at the end"


def test_a_batching_server_fills_its_slots(probed) -> None:
    result = probed(SMALL, GaugeNames.SGLANG)
    assert [step.in_flight for step in result.steps[:4]] == [1, 2, 4, 8]
    assert result.verdict == (Verdict.SATURATED, Ending.NO_GROWTH)
    assert (result.findings.batches, result.findings.slots) == (True, 4)
    assert result.findings.slots_stated
    assert in_flight(result.findings) >= 4
    assert result.steps[-1].running == pytest.approx(4, abs=0.2)


def test_slots_that_no_server_states_are_found_when_requests_wait(probed) -> None:
    result = probed(SMALL, GaugeNames.VLLM, most=8)
    assert (result.findings.slots, result.findings.slots_stated) == (4, False)
    lines = "\n".join(result.advice.lines(result.findings))
    assert "The server batches; 4 slots" in lines


def test_a_slow_front_end_is_recognised(probed) -> None:
    result = probed(FRONT_END, GaugeNames.VLLM, most=128)
    assert result.advice.verdict is Verdict.FRONT_END_BOUND


@pytest.mark.parametrize("rates", [SMALL, REPORT], ids=["4 slots", "64 slots"])
def test_throughput_of_a_step_is_that_of_the_server(probed, rates) -> None:
    result = probed(rates, GaugeNames.NONE, most=4)
    alone = rates.vision_tokens / rates.prefill + rates.answer_tokens / rates.decode_one
    assert result.steps[0].pages_per_second == pytest.approx(1 / alone, rel=0.2)
    speeds = [step.pages_per_second for step in result.steps]
    assert speeds == sorted(speeds)
