"""An OCR server without a GPU: the OpenAI API over a simulated batch, with gauges or without.

    python -m tests.simulators.simulated_server report --gauges vllm --scale 60 --port 5002

`--scale` is the factor by which its time runs faster; the clock of a client under test must be
scaled by the same factor. GET /times returns when requests for pages came and were answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from tests.simulators.simulated_batch import SERVERS, UNTUNED, Batch, Rates

MODEL = "glm-ocr"
# A request with fewer bytes has no picture: it is a client's first check.
SMALLEST_PICTURE = 512
# olmocr needs these lines before the text; for the others they are text.
TEXT = """---
primary_language: en
is_rotation_valid: True
rotation_correction: 0
is_table: False
is_diagram: False
---
What the page says."""

_JSON, _TEXT = "application/json", "text/plain; version=0.0.4"


class GaugeNames(StrEnum):
    """The server whose names the gauges have."""

    VLLM = "vllm"
    SGLANG = "sglang"
    NONE = "none"


@dataclass
class Counts:
    """When page requests came and were answered, and the number of clients that left before."""

    came: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    left: int = 0


class SimulatedServer:
    """A batch behind HTTP, in the event loop of one process."""

    def __init__(
        self,
        rates: Rates,
        gauges: GaugeNames,
        *,
        scale: float = 1.0,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`scale`: simulated seconds in one second of the clock."""
        self.batch = Batch(rates, seed=seed)
        self.counts = Counts()
        self._gauges = gauges
        self._scale = scale
        self._clock = clock
        self._began = clock()
        self._answers: dict[int, Callable[[], None]] = {}
        self._next_key = 0
        self._timer: asyncio.TimerHandle | None = None

    async def listen(self, port: int = 0) -> asyncio.Server:
        """Serve on loopback."""
        loop = asyncio.get_running_loop()
        return await loop.create_server(lambda: _Connection(self), "127.0.0.1", port, backlog=2048)

    @property
    def open(self) -> int:
        """Requests that came and were neither answered nor dropped by their clients."""
        return len(self._answers)

    def now(self) -> float:
        """Simulated seconds since the start."""
        return (self._clock() - self._began) * self._scale

    def arrive(self, answer: Callable[[], None]) -> int:
        """Take in a page request; `answer` is called when it is done."""
        self._catch_up()
        self._next_key += 1
        self.counts.came.append(self.now())
        self._answers[self._next_key] = answer
        self.batch.arrive(self._next_key)
        self._set_timer()
        return self._next_key

    def leave(self, key: int) -> None:
        """Drop a request whose client has gone."""
        if self._answers.pop(key, None) is not None:
            self._catch_up()
            self.counts.left += 1
            self.batch.leave(key)
            self._set_timer()

    def metrics(self) -> str | None:
        """Return the gauges in Prometheus's format, or None if the server has none."""
        self._catch_up()
        batch = self.batch
        if self._gauges is GaugeNames.VLLM:
            return _lines("vllm", {
                "num_requests_running": batch.running,
                "num_requests_waiting": batch.waiting,
                "kv_cache_usage_perc": batch.cache_use,
                "prompt_tokens_total": batch.prompt_tokens,
                "generation_tokens_total": batch.answer_tokens,
            })  # fmt: skip
        if self._gauges is GaugeNames.SGLANG:
            return _lines("sglang", {
                "num_running_reqs": batch.running,
                "num_queue_reqs": batch.waiting,
                "token_usage": batch.cache_use,
                "prompt_tokens_total": batch.prompt_tokens,
                "generation_tokens_total": batch.answer_tokens,
            })  # fmt: skip
        return None

    def server_info(self) -> dict[str, Any] | None:
        """Return SGLang's answer about itself; vLLM has no such page."""
        if self._gauges is not GaugeNames.SGLANG:
            return None
        return {"max_running_requests": self.batch.rates.slots, "version": "simulated"}

    def _catch_up(self) -> None:
        for key in self.batch.advance(max(self.now(), self.batch.now)):
            answer = self._answers.pop(int(str(key)), None)
            if answer is not None:
                self.counts.answered.append(self.now())
                answer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        event = self.batch.next_event()
        if event != float("inf"):
            delay = max(0.0, (event - self.now()) / self._scale)
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._catch_up()
        self._set_timer()


class _Connection(asyncio.Protocol):
    """HTTP/1.1 with Content-Length, one request after the other; only body sizes are kept."""

    def __init__(self, server: SimulatedServer) -> None:
        self._server = server
        self._head = bytearray()
        self._missing: int | None = None
        self._size = 0
        self._path = ""
        self._key: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._key is not None:
            self._server.leave(self._key)

    def data_received(self, data: bytes) -> None:
        if self._missing is None:
            self._head += data
            if b"\r\n\r\n" not in self._head:
                return
            self._begin()
        else:
            self._missing -= len(data)
        if self._missing is not None and self._missing <= 0:
            self._missing = None
            self._answer()

    def _begin(self) -> None:
        head, _, body = bytes(self._head).partition(b"\r\n\r\n")
        self._head.clear()
        lines = head.decode("latin-1").lower().split("\r\n")
        lengths = [line[15:] for line in lines if line.startswith("content-length:")]
        self._size = int(lengths[0]) if lengths else 0
        self._missing = self._size - len(body)
        self._path = lines[0].split(" ")[1]
        if any(line.startswith("expect:") for line in lines):
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _answer(self) -> None:
        if self._path == "/v1/chat/completions":
            if self._size < SMALLEST_PICTURE:
                self._complete()
            else:
                self._key = self._server.arrive(self._complete)
            return
        known: dict[str, Callable[[], dict[str, Any] | None]] = {
            "/health": lambda: {},
            "/v1/models": lambda: {"data": [{"id": MODEL, "max_model_len": 32768}]},
            "/server_info": self._server.server_info,
            "/times": lambda: asdict(self._server.counts),
        }
        if self._path == "/metrics" and (text := self._server.metrics()) is not None:
            self._send(200, text, _TEXT)
        elif self._path in known and (content := known[self._path]()) is not None:
            self._send(200, json.dumps(content), _JSON)
        else:
            self._send(404, "{}", _JSON)

    def _complete(self) -> None:
        self._key = None
        rates = self._server.batch.rates
        self._send(200, json.dumps(_completion(rates)), _JSON)

    def _send(self, status: int, text: str, kind: str) -> None:
        body = text.encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)


def _completion(rates: Rates) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": TEXT},
        "finish_reason": "stop",
    }
    usage = {
        "prompt_tokens": rates.vision_tokens,
        "completion_tokens": rates.answer_tokens,
        "total_tokens": rates.vision_tokens + rates.answer_tokens,
    }
    return {"id": "page", "object": "chat.completion", "model": MODEL, "created": 0,
            "choices": [choice], "usage": usage}  # fmt: skip


def _lines(prefix: str, values: dict[str, float]) -> str:
    return "".join(
        f'{prefix}:{name}{{model_name="{MODEL}"}} {float(value)}\n'
        for name, value in values.items()
    )


async def _serve(options: argparse.Namespace) -> None:
    rates = (SERVERS | UNTUNED)[options.server]
    if options.slots:
        rates = replace(rates, slots=options.slots)
    server = SimulatedServer(rates, GaugeNames(options.gauges), scale=options.scale)
    listener = await server.listen(options.port)
    print(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", flush=True)
    ended = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, ended.set)
    await ended.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", choices=sorted(SERVERS | UNTUNED))
    parser.add_argument("--gauges", choices=[*GaugeNames], default="vllm")
    parser.add_argument("--scale", type=float, default=1.0, help="simulated seconds in a second")
    parser.add_argument("--slots", type=int, help="slots instead of the server's own")
    parser.add_argument("--port", type=int, default=5002)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
