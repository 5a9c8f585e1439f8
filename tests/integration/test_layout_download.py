"""The download of the layout model's weights: complete, once, or an error."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rag_service.errors import ConfigurationError
from rag_service.layout.model_download import ensure_model

CONFIG = b'{"model_type": "pp_doclayout_v3"}'
WEIGHTS = bytes(range(256)) * 12000


class Hub:
    """A repository as the hub serves it: small files directly, large ones by a redirect."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.repo = f"{url}/owner/model"
        self.digest = hashlib.sha256(WEIGHTS).hexdigest()
        self.sent = len(WEIGHTS)
        self.asked: list[str] = []


@contextmanager
def serving() -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.asked.append(self.path)
            if self.path == "/owner/model/resolve/main/config.json":
                self._send(CONFIG)
            elif self.path == "/owner/model/resolve/main/model.safetensors":
                self.send_response(302)
                self.send_header("X-Linked-Etag", f'"{hub.digest}"')
                self.send_header("Location", f"{hub.url}/storage/blob")
                self.send_header("Content-Length", "0")
                self.end_headers()
            elif self.path == "/storage/blob":
                self._send(WEIGHTS, hub.sent)
            else:
                self.send_error(404)

        def _send(self, body: bytes, part: int | None = None) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:part])

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as one:
        yield one


def assert_whole(folder: Path) -> None:
    assert (folder / "config.json").read_bytes() == CONFIG
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert list(folder.parent.iterdir()) == [folder]


def test_missing_weights_are_downloaded_once_and_logged(hub, tmp_path, caplog) -> None:
    folder = tmp_path / "models" / "layout"
    with caplog.at_level(logging.WARNING):
        assert ensure_model(folder, hub.repo) is False
    assert str(folder) in caplog.text
    assert_whole(folder)
    asked = len(hub.asked)
    assert ensure_model(folder, hub.repo) is True
    assert len(hub.asked) == asked


def test_several_downloads_at_once_leave_one_complete_folder(hub, tmp_path) -> None:
    folder = tmp_path / "models" / "layout"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: ensure_model(folder, hub.repo), range(4)))
    assert_whole(folder)


def nothing_remains(folder: Path, repo: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        ensure_model(folder, repo)
    assert list(folder.parent.iterdir()) == []


def test_a_download_that_breaks_off_leaves_nothing(hub, tmp_path) -> None:
    hub.sent = 100_000
    nothing_remains(tmp_path / "layout", hub.repo, "RemoteProtocolError")


def test_bytes_with_another_hash_leave_nothing(hub, tmp_path) -> None:
    hub.digest = "0" * 64
    nothing_remains(tmp_path / "layout", hub.repo, "SHA-256 of model.safetensors")


def test_a_missing_repository_is_an_error(hub, tmp_path) -> None:
    nothing_remains(tmp_path / "layout", f"{hub.url}/owner/other", "404")


def test_a_folder_with_other_content_is_unchanged(hub, tmp_path) -> None:
    folder = tmp_path / "layout"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match="cannot be downloaded"):
        ensure_model(folder, hub.repo)
    assert [file.name for file in folder.iterdir()] == ["notes.txt"]


def test_an_empty_folder_is_filled(hub, tmp_path) -> None:
    (tmp_path / "layout").mkdir()
    assert ensure_model(tmp_path / "layout", hub.repo) is False
    assert_whole(tmp_path / "layout")
