"""A fake OpenAI-compatible OCR server that can fail in many ways: a real HTTP server on loopback.

It finds each page by the mark in its picture and answers with the mark's text, unless it has
other replies for the page or for all pages. It counts requests, the most requests at once, and
the most requests at once of one page. Any thread may call its methods.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rag_service.ocr.known_page import COMMENT, WORDS
from tests.fakes.scans import Mark, look

MODEL = "glm-ocr"
_WAIT_SECONDS = 120
_PHRASES = {200: "OK", 404: "Not Found", 429: "Too Many Requests", 503: "Service Unavailable"}


class Gate:
    """Holds requests until it is opened; the first one sets `arrived`."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self._open = threading.Event()

    def open(self) -> None:
        """Let all requests through, later ones too."""
        self._open.set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()


@dataclass(frozen=True)
class Reply:
    """One answer. Without a body it is a completion with `text`, by default the page's text."""

    status: int = 200
    text: str | None = None
    finish_reason: str | None = "stop"
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: float = 0.0
    gate: Gate | None = None
    # The connection: None (kept), "cut" in the middle of the body, "drop" before it.
    fault: str | None = None


OK = Reply()
EMPTY = Reply(text="")
NEVER = Reply(gate=Gate())
CUT = Reply(fault="cut")
DROPPED = Reply(fault="drop")
HTML_200 = Reply(body=b"<!doctype html><title>Sign in</title>")
TRUNCATED_JSON = Reply(body=b'{"choices": [{"message": {"content": "half of')
NO_CHOICES = Reply(body=b'{"choices": []}')
NULL_CONTENT = Reply(body=b'{"choices": [{"message": {"content": null}, "finish_reason": "stop"}]}')
BAD_GZIP = Reply(body=b"no gzip at all", headers={"Content-Encoding": "gzip"})
# NUL and half of a surrogate pair, as JSON encoders write a model's broken tokens.
BROKEN_CHARACTERS = Reply(
    body=b'{"choices": [{"message": {"content": "a\\u0000b \\ud83d c"}, "finish_reason": "stop"}]}'
)
HALF = Reply(text="Half of the", finish_reason="length")
LOOP = Reply(text="The same line again.\n" * 300, finish_reason="length")
ENCODER_CACHE = Reply(
    400,
    body=b'{"error": {"message": "The image item exceeds the encoder cache size of 8192."}}',
)
TOO_LARGE = Reply(413, body=b"<html><body>413 Request Entity Too Large</body></html>")


def refusal(status: int, message: str = "This picture is of no use.") -> Reply:
    """A 4xx as JSON, as OpenAI's servers answer it."""
    return Reply(status, body=json.dumps({"error": {"message": message}}).encode())


def gateway(status: int) -> Reply:
    """A 5xx with the HTML of a proxy in front of the server."""
    body = f"<html><head><title>{status}</title></head><body>nginx</body></html>".encode()
    return Reply(status, body=body, headers={"Content-Type": "text/html"})


def busy(retry_after: str | None = None) -> Reply:
    """A 429, with a Retry-After if one is given."""
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    return Reply(429, body=b'{"error": {"message": "Slow down."}}', headers=headers)


@dataclass
class Request:
    """One page request, and its outcome: answered, disconnected, cut, drop."""

    mark: Mark | None
    sha256: str
    width: int
    height: int
    max_tokens: int
    body: dict[str, Any]
    authorization: str | None
    client_port: int
    started: float
    is_known_page: bool = False
    ended: float | None = None
    outcome: str | None = None

    @property
    def page(self) -> Mark | str:
        """The page's mark, or the picture's digest if it has none."""
        return self.mark or self.sha256


class FakeOcrServer:
    """Use as a context manager. `url` stays the same while the server refuses and listens again."""

    def __init__(self) -> None:
        self.default: Reply = OK
        # The answer to the known page; None: the default one.
        self.known: Reply | None = None
        self.known_pages = 0
        self.health: Reply = Reply(body=b"")
        self.models: list[dict[str, Any]] = [{"id": MODEL, "max_model_len": 32768}]
        self.models_status = 200
        # What it answers in place of its list of models.
        self.not_models: Reply | None = None
        self.key: str | None = None
        # Called in the server's thread with each page request before it is answered.
        self.on_request: Callable[[Request], None] = lambda _: None
        self.requests: list[Request] = []
        self.probes = 0
        self._scripts: dict[Mark, deque[Reply]] = defaultdict(deque)
        self._always: dict[Mark, Reply] = {}
        self._next: deque[Reply] = deque()
        self._alive: dict[Mark | str, int] = defaultdict(int)
        self._peaks: dict[Mark | str, int] = defaultdict(int)
        self._peak = 0
        self._lock = threading.RLock()
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> FakeOcrServer:
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-ocr", daemon=True)
        self._thread.start()
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self.refuse()
        asyncio.run_coroutine_threadsafe(self._end_tasks(), self._loop).result(_WAIT_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_WAIT_SECONDS)
        self._loop.close()

    # Replies.

    def script(self, page: Mark, *replies: Reply) -> None:
        """Set the next answers for this page, in order."""
        with self._lock:
            self._scripts[page].extend(replies)

    def always(self, page: Mark, reply: Reply) -> None:
        """Set the answer for this page after its scripted ones."""
        with self._lock:
            self._always[page] = reply

    def hold(self, page: Mark) -> Gate:
        """Hold every request of this page until the gate is opened."""
        gate = Gate()
        self.always(page, Reply(gate=gate))
        return gate

    def next(self, *replies: Reply) -> None:
        """Set the next answers for pages without answers of their own."""
        with self._lock:
            self._next.extend(replies)

    def refuse(self) -> None:
        """Stop listening and cut every connection: connections are refused from now on."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(_WAIT_SECONDS)

    def listen(self) -> None:
        """Listen, on the same port as before."""
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(_WAIT_SECONDS)

    def reset(self) -> None:
        """Remove all answers and records; be a healthy server again."""
        with self._lock:
            self.default, self.health = OK, Reply(body=b"")
            self.known, self.known_pages = None, 0
            self.models = [{"id": MODEL, "max_model_len": 32768}]
            self.models_status, self.key, self.not_models = 200, None, None
            self.on_request = lambda _: None
            self.requests, self.probes, self._peak = [], 0, 0
            for records in (self._scripts, self._always, self._next, self._peaks):
                records.clear()
        self.listen()

    # Requests received.

    def of(self, page: Mark) -> list[Request]:
        """Return the requests of a page, in order."""
        with self._lock:
            return [request for request in self.requests if request.mark == page]

    def of_document(self, document: int) -> list[Request]:
        """Return the requests of all pages of a scan, in order."""
        with self._lock:
            return [r for r in self.requests if r.mark and r.mark.document == document]

    def alive(self, page: Mark | None = None) -> int:
        """Return how many requests are open now, of a page or of all pages."""
        with self._lock:
            return self._alive[page] if page else sum(self._alive.values())

    @property
    def peak(self) -> int:
        """The most requests that were open at once."""
        return self._peak

    def peak_of(self, page: Mark) -> int:
        """Return the most requests of one page that were open at once."""
        with self._lock:
            return self._peaks[page]

    @property
    def doubled(self) -> list[Mark | str]:
        """Pages that had two requests open at once; there must be none."""
        with self._lock:
            return [page for page, peak in self._peaks.items() if peak > 1]

    # The server.

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
            while (received := await _read(reader)) is not None:
                if not await self._answer(*received, reader, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer(
        self,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Answer one request. Return False if the connection ends with it."""
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            return await _send(writer, refusal(401, "Wrong key."), b"")
        if path == "/health":
            self.probes += 1
            return await _send(writer, self.health, b"ok")
        if path == "/v1/models":
            listing = json.dumps({"object": "list", "data": self.models}).encode()
            return await _send(writer, self.not_models or Reply(self.models_status), listing)
        if path != "/v1/chat/completions":
            return await _send(writer, refusal(404, f"No {path} here."), b"")
        port = writer.get_extra_info("peername")[1]
        parsed = _parse(json.loads(body), headers, port)
        if parsed.is_known_page:
            return await self._answer_known_page(parsed, reader, writer)
        request = self._enter(parsed)
        outcome = "disconnected"
        try:
            reply = self._reply_to(request)
            if await _client_left(reply, reader):
                return False
            going_on = await _send(writer, reply, _completion(request, reply))
            outcome = reply.fault or "answered"
            return going_on
        finally:
            self._leave(request, outcome)

    async def _answer_known_page(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        self.known_pages += 1
        reply = self.known or self.default
        if await _client_left(reply, reader):
            return False
        return await _send(writer, reply, _completion(request, reply))

    def _enter(self, request: Request) -> Request:
        with self._lock:
            self.requests.append(request)
            self._alive[request.page] += 1
            self._peaks[request.page] = max(self._peaks[request.page], self._alive[request.page])
            self._peak = max(self._peak, sum(self._alive.values()))
        return request

    def _leave(self, request: Request, outcome: str) -> None:
        with self._lock:
            self._alive[request.page] -= 1
            request.ended, request.outcome = time.monotonic(), outcome

    def _reply_to(self, request: Request) -> Reply:
        self.on_request(request)
        with self._lock:
            if request.mark and self._scripts[request.mark]:
                return self._scripts[request.mark].popleft()
            if request.mark in self._always:
                return self._always[request.mark]
            return self._next.popleft() if self._next else self.default


async def _read(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes] | None:
    """Return path, headers and body of the next request, or None if the client disconnected."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *rest = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in rest if line)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return first.split()[1], headers, body


def _parse(body: dict[str, Any], headers: Mapping[str, str], port: int) -> Request:
    content = body["messages"][0]["content"]
    url = next(part["image_url"]["url"] for part in content if part["type"] == "image_url")
    jpeg = base64.b64decode(url.partition("base64,")[2])
    picture = look(jpeg)
    return Request(
        *picture,
        max_tokens=body["max_tokens"],
        body=body,
        authorization=headers.get("authorization"),
        client_port=port,
        started=time.monotonic(),
        is_known_page=COMMENT in jpeg[:200],
    )


async def _client_left(reply: Reply, reader: asyncio.StreamReader) -> bool:
    """Wait as the reply asks. Return True if the client disconnected meanwhile.

    A client sends nothing before it has its answer, so a read ends when it disconnects.
    """
    gone = asyncio.ensure_future(reader.read(1))
    try:
        deadline = time.monotonic() + reply.delay
        if reply.gate is not None:
            reply.gate.arrived.set()
        while time.monotonic() < deadline or (reply.gate and not reply.gate.is_open):
            done, _ = await asyncio.wait({gone}, timeout=0.01)
            if done:
                return True
        return gone.done()
    finally:
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await gone


def _completion(request: Request, reply: Reply) -> bytes:
    text = request.mark.text if request.mark else "A page."
    text = " ".join(WORDS) if request.is_known_page else text
    text = text if reply.text is None else reply.text
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": reply.finish_reason,
    }
    usage = {"prompt_tokens": 100, "completion_tokens": len(text) // 4}
    return json.dumps({"model": MODEL, "choices": [choice], "usage": usage}).encode()


async def _send(writer: asyncio.StreamWriter, reply: Reply, body: bytes) -> bool:
    """Write the reply, by default with this body. Return False if the connection is cut."""
    body = body if reply.body is None else reply.body
    if reply.fault == "drop":
        writer.transport.abort()
        return False
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **reply.headers,
    }
    lines = [f"HTTP/1.1 {reply.status} {_PHRASES.get(reply.status, 'Status')}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    writer.write(body[: len(body) // 2] if reply.fault == "cut" else body)
    await writer.drain()
    if reply.fault == "cut":
        writer.close()
    return reply.fault is None
