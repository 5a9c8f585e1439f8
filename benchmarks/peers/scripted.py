"""An OCR server that gives prepared answers and keeps the requests it got."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from PIL import Image

MODEL = "glm-ocr"


@dataclass(frozen=True)
class Asked:
    """One request: its prompt, its picture, and the rest of its body."""

    prompt: str
    picture: Image.Image
    settings: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What comes back; with a status of 200 and no `body` a completion with this text."""

    text: str = ""
    status: int = 200
    finish_reason: str = "stop"
    body: bytes | None = None

    def encode(self) -> bytes:
        """The body of the response."""
        if self.body is not None:
            return self.body
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self.text},
            "finish_reason": self.finish_reason,
        }
        return json.dumps({"model": MODEL, "choices": [choice], "usage": {}}).encode()


Script = Callable[[Asked], Answer]


class ScriptedServer:
    """Use as a context manager; `script` says what each request with a picture is answered."""

    def __init__(self) -> None:
        self.script: Script = lambda _: Answer()
        self._asked: list[Asked] = []
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())

    def __enter__(self) -> ScriptedServer:
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.shutdown()
        self._http.server_close()

    @property
    def port(self) -> int:
        return self._http.server_port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def take(self) -> list[Asked]:
        """What was asked since the last time."""
        with self._lock:
            asked, self._asked = self._asked, []
        return asked

    def _answer(self, body: dict[str, Any]) -> Answer:
        asked = _asked(body)
        if asked is None:
            return Answer("Hello.")
        with self._lock:
            self._asked.append(asked)
        return self.script(asked)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answer_for = self._answer

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                models = {"object": "list", "data": [{"id": MODEL, "max_model_len": 32768}]}
                self._send(200, json.dumps(models).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = answer_for(body)
                self._send(answer.status, answer.encode())

            def _send(self, status: int, body: bytes) -> None:
                # A client that gives a page up leaves its other requests.
                with contextlib.suppress(ConnectionError):
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """The standard library's own would write every request to standard error."""

        return Handler


def _asked(body: dict[str, Any]) -> Asked | None:
    """Return None if there is no picture: a first check."""
    content = body.pop("messages")[0]["content"]
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    if not urls:
        return None
    prompts = [part["text"] for part in content if part["type"] == "text"]
    picture = Image.open(io.BytesIO(base64.b64decode(urls[0].partition("base64,")[2])))
    picture.load()
    return Asked(" ".join(prompts), picture, body)
