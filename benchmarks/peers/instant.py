"""An OCR server that answers at once and reads every byte: what is left is the client's own work.

It stands in for a layout server too, with the same boxes for every page. Runs in a process of its
own, whose CPU is counted for no client.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Event
from types import TracebackType
from typing import Any

from benchmarks.peers.boxes import ORDINARY_PAGE
from tests.simulators.simulated_server import MODEL, SMALLEST_PICTURE, TEXT

POLL_SECONDS = 0.005
START_SECONDS = 30.0


@dataclass(frozen=True)
class Seen:
    """Requests with a picture that came in whole, their bytes, and when the last one had."""

    requests: int
    bytes: int
    last: float


class InstantServer:
    """Use as a context manager.

    A client's first question (its greeting, or the list of models) is kept waiting until the
    caller has looked at the client's counters: arm(), start the client, await_client(), open().
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._port = context.Value("i", 0)
        self._counts = context.Array("q", 2)
        self._last = context.Value("d", 0.0)
        self._asked, self._opened = context.Event(), context.Event()
        self._opened.set()
        shared = (self._port, self._counts, self._last, self._asked, self._opened)
        self._process = context.Process(target=_serve, args=shared, daemon=True)

    def __enter__(self) -> InstantServer:
        self._process.start()
        deadline = time.monotonic() + START_SECONDS
        while not self.port:
            if time.monotonic() > deadline:
                raise TimeoutError("The server that answers at once does not start.")
            time.sleep(POLL_SECONDS)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.join()

    @property
    def port(self) -> int:
        return int(self._port.value)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def arm(self) -> None:
        """Count from nothing, and let the next client wait at its first question."""
        self._opened.clear()
        self._asked.clear()
        self.forget()

    def forget(self) -> None:
        """Count from nothing."""
        self._counts[0] = self._counts[1] = 0

    def await_client(self, seconds: float) -> None:
        """Until a client waits at its first question. Raises TimeoutError."""
        if not self._asked.wait(seconds):
            raise TimeoutError("No client came.")

    def open(self) -> None:
        """Answer it, and all that follow at once."""
        self._opened.set()

    def seen(self) -> Seen:
        return Seen(int(self._counts[0]), int(self._counts[1]), float(self._last.value))


def _serve(port: Any, counts: Any, last: Any, asked: Event, opened: Event) -> None:
    asyncio.run(_listen(port, counts, last, asked, opened))


async def _listen(port: Any, counts: Any, last: Any, asked: Event, opened: Event) -> None:
    def count(size: int) -> None:
        counts[0] += 1
        counts[1] += size
        last.value = time.monotonic()

    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: _Connection(count, asked, opened), "127.0.0.1", 0, backlog=1024
    )
    port.value = server.sockets[0].getsockname()[1]
    await server.serve_forever()


class _Connection(asyncio.Protocol):
    """HTTP/1.1 with Content-Length, one request after the other; bodies are counted, not kept."""

    def __init__(self, count: Any, asked: Event, opened: Event) -> None:
        self._count = count
        self._asked, self._opened = asked, opened
        self._head = b""
        self._missing = self._size = 0
        self._path = ""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._missing -= len(data)
        else:
            self._head += data
            if b"\r\n\r\n" not in self._head:
                return
            self._begin()
        if self._missing <= 0:
            self._end()

    def _begin(self) -> None:
        head, _, body = self._head.partition(b"\r\n\r\n")
        self._head = b""
        lines = head.decode("latin-1").lower().split("\r\n")
        lengths = [line[15:] for line in lines if line.startswith("content-length:")]
        self._size = int(lengths[0]) if lengths else 0
        self._missing = self._size - len(body)
        self._path = lines[0].split(" ")[1]
        if any(line.startswith("expect:") for line in lines):
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _end(self) -> None:
        if self._path == "/layout":
            self._transport.write(_LAYOUT)
        elif self._size >= SMALLEST_PICTURE:
            self._count(self._size)
            self._transport.write(_COMPLETION)
        else:
            self._asked.set()
            self._answer_question(_COMPLETION if self._size else _MODELS)

    def _answer_question(self, answer: bytes) -> None:
        if self._transport.is_closing():
            return
        if self._opened.is_set():
            self._transport.write(answer)
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(POLL_SECONDS, self._answer_question, answer)


def _response(content: dict[str, Any]) -> bytes:
    body = json.dumps(content).encode()
    head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "
    return f"{head}{len(body)}\r\n\r\n".encode() + body


_LAYOUT = _response({"model": "given", "boxes": [asdict(box) for box in ORDINARY_PAGE]})
_MODELS = _response({"object": "list", "data": [{"id": MODEL, "max_model_len": 32768}]})
_COMPLETION = _response(
    {
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 100, "completion_tokens": 50, "total_tokens": 150},
    }
)
