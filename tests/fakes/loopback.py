"""A small HTTP/1.1 server in its own thread, which can cut connections.

Fakes of services use it: they pass one coroutine that answers requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, urlsplit

_WAIT_SECONDS = 120


@dataclass(frozen=True)
class Request:
    """One request; `gone` is done when the client has disconnected."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    gone: asyncio.Future[Any]


@dataclass(frozen=True)
class Answer:
    """One answer. `cut`: None, "whole" for no answer at all, "half" for half of its body."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: str | None = None

    @classmethod
    def json(cls, body: Any, status: int = 200) -> Answer:
        return cls(status, json.dumps(body).encode(), {"Content-Type": "application/json"})


class Loopback:
    """Use as a context manager. `url` stays the same while it refuses and listens again."""

    def __init__(self, answer: Callable[[Request], Awaitable[Answer]]) -> None:
        self._answer = answer
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Loopback:
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self.refuse()
        self._wait(self._end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_WAIT_SECONDS)
        self._loop.close()

    def refuse(self) -> None:
        """Stop listening and cut every connection: connections are refused from now on."""
        self._wait(self._close())

    def listen(self) -> None:
        """Listen, on the same port as before."""
        self._wait(self._listen())

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine in the server's event loop until the server ends."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_WAIT_SECONDS)

    async def _listen(self) -> None:
        if self._server is None:
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", self._port))
            self._port = sock.getsockname()[1]
            self._server = await asyncio.start_server(self._serve, sock=sock, backlog=512)

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._connections):
            writer.transport.abort()

    async def _end_tasks(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while (request := await _read(reader, writer)) is not None:
                answer = await self._answer(request)
                await _stop_watching(request.gone)
                if not await _send(writer, answer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
    """Return the next request, or None if the client has disconnected.

    A client sends nothing before it has its answer, so a read then ends when it disconnects.
    """
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *rest = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    pairs = (line.partition(":") for line in rest if line)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    if headers.get("expect"):
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    address = urlsplit(target)
    query = {name: values[0] for name, values in parse_qs(address.query).items()}
    gone = asyncio.ensure_future(reader.read(1))
    return Request(method, address.path, query, headers, body, gone)


async def _stop_watching(gone: asyncio.Future[Any]) -> None:
    gone.cancel()
    with contextlib.suppress(asyncio.CancelledError, ConnectionError):
        await gone


async def _send(writer: asyncio.StreamWriter, answer: Answer) -> bool:
    """Write the answer. Return False if the connection ends with it."""
    if answer.cut == "whole":
        writer.transport.abort()
        return False
    headers = {"Content-Length": str(len(answer.body)), **answer.headers}
    lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    half = answer.cut == "half"
    writer.write(answer.body[: len(answer.body) // 2] if half else answer.body)
    await writer.drain()
    return not half
