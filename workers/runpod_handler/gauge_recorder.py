"""Sample the OCR server's gauges while a job runs: how many requests its batch held.

SGLang and vLLM name them differently; some servers have none.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from rag_service.config.options import OcrOptions
from rag_service.ocr.ocr_client import server_url
from rag_service.runpod.job_format import GaugeMeans

_SAMPLE_SECONDS = 1.0
_TIMEOUT_SECONDS = 5.0
_RUNNING = frozenset({"sglang:num_running_reqs", "vllm:num_requests_running"})
_WAITING = frozenset({"sglang:num_queue_reqs", "vllm:num_requests_waiting"})
_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)")


@dataclass
class GaugeRecord:
    """Samples of (running, waiting) requests, and the server's slots and version."""

    samples: list[tuple[float, float]] = field(default_factory=list)
    slots: int | None = None
    version: str | None = None

    def gauges(self) -> GaugeMeans | None:
        """Return means over the samples; None if the server has no gauges."""
        if not self.samples:
            return None if self.slots is None else GaugeMeans(slots=self.slots)
        running, waiting = (
            sum(values) / len(self.samples) for values in zip(*self.samples, strict=True)
        )
        return GaugeMeans(
            running_mean=round(running, 2), waiting_mean=round(waiting, 2), slots=self.slots
        )


@asynccontextmanager
async def recorded(settings: OcrOptions) -> AsyncIterator[GaugeRecord]:
    """Sample the server while the context lasts."""
    record = GaugeRecord()
    async with httpx.AsyncClient(base_url=server_url(settings), timeout=_TIMEOUT_SECONDS) as client:
        sampling = asyncio.create_task(_sample(client, record))
        try:
            yield record
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)


async def _sample(client: httpx.AsyncClient, record: GaugeRecord) -> None:
    info = await _ask(client, "/server_info")
    record.slots, record.version = _server_info(info)
    while (answer := await _ask(client, "/metrics")) is not None:
        sample = read_gauges(answer.text)
        if sample is None:
            return
        record.samples.append(sample)
        await asyncio.sleep(_SAMPLE_SECONDS)


async def _ask(client: httpx.AsyncClient, path: str) -> httpx.Response | None:
    """Return the answer; None if the server has no such page or does not answer."""
    try:
        response = await client.get(path)
    except httpx.RequestError:
        return None
    return response if response.status_code == httpx.codes.OK else None


def read_gauges(text: str) -> tuple[float, float] | None:
    """Return running and waiting requests in Prometheus text, summed over labels, or None."""
    running: list[float] = []
    waiting: list[float] = []
    for line in text.splitlines():
        found = _LINE.match(line)
        if found and found[1] in _RUNNING:
            running.append(float(found[2]))
        elif found and found[1] in _WAITING:
            waiting.append(float(found[2]))
    return (sum(running), sum(waiting)) if running else None


def _server_info(response: httpx.Response | None) -> tuple[int | None, str | None]:
    """Return slots and version from SGLang's /server_info; other servers have no such page."""
    try:
        info: Any = response.json() if response is not None else {}
    except ValueError:
        return None, None
    if not isinstance(info, dict):
        return None, None
    slots, version = info.get("max_running_requests"), info.get("version")
    return slots if isinstance(slots, int) else None, version if version is None else str(version)
