"""Gauges of an OCR server's batch, under vLLM's or SGLang's names.

A server without gauges gives None, and everything works without them.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

_SECONDS = 5.0
_RUNNING = ("sglang:num_running_reqs", "vllm:num_requests_running")
_WAITING = ("sglang:num_queue_reqs", "vllm:num_requests_waiting")
_CACHE_USE = ("sglang:token_usage", "vllm:kv_cache_usage_perc")
# Tokens taken in and generated since the server's start. They show its throughput from the first
# second, while answers come in lumps.
_TOKENS = (
    ("sglang:prompt_tokens_total", "sglang:generation_tokens_total"),
    ("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
)
_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+([^\s#]+)")


@dataclass(frozen=True, slots=True)
class ServerGauges:
    """Requests that run and wait, tokens since the start, share of the KV cache in use."""

    running: float
    waiting: float
    tokens: float | None = None
    cache_use: float | None = None


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits that do not change: the requests a server can batch, and its version."""

    slots: int | None = None
    version: str | None = None


async def read_gauges(http: httpx.AsyncClient) -> ServerGauges | None:
    """Return the gauges now, or None if the server shows none or does not answer."""
    answer = await _ask(http, "/metrics")
    return None if answer is None else parse_gauges(answer.text)


async def read_limits(http: httpx.AsyncClient) -> ServerLimits:
    """Return what SGLang reports in /server_info and vLLM in /version; empty for others."""
    info = _json(await _ask(http, "/server_info"))
    slots, version = info.get("max_running_requests"), info.get("version")
    if version is None:
        version = _json(await _ask(http, "/version")).get("version")
    return ServerLimits(
        slots if isinstance(slots, int) else None, None if version is None else str(version)
    )


def parse_gauges(text: str) -> ServerGauges | None:
    """Return the gauges from Prometheus text, summed over labels; None without running requests."""
    values: dict[str, list[float]] = defaultdict(list)
    for line in text.splitlines():
        found = _LINE.match(line)
        if found and ":" in found[1] and (value := _count(found[2])) is not None:
            values[found[1]].append(value)
    running, waiting = _first(values, _RUNNING), _first(values, _WAITING)
    if not running:
        return None
    cache = [share for share in _first(values, _CACHE_USE) if share <= 1]
    return ServerGauges(sum(running), sum(waiting), _tokens(values), max(cache) if cache else None)


def _count(text: str) -> float | None:
    """Return None for a value that no server can have counted."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def _tokens(values: Mapping[str, list[float]]) -> float | None:
    for names in _TOKENS:
        found = [sum(values[name]) for name in names if name in values]
        if found:
            return found[-1]
    return None


def _first(values: Mapping[str, list[float]], names: tuple[str, ...]) -> list[float]:
    return next((values[name] for name in names if name in values), [])


async def _ask(http: httpx.AsyncClient, path: str) -> httpx.Response | None:
    try:
        response = await http.get(path, timeout=_SECONDS)
    except httpx.RequestError:
        return None
    return response if response.status_code == httpx.codes.OK else None


def _json(response: httpx.Response | None) -> Mapping[str, Any]:
    try:
        body: Any = response.json() if response is not None else {}
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
