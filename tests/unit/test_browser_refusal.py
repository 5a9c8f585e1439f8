"""Servers for programs alone, in the face of web pages and of files that hold secrets."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from rag_service.config.loader import load_settings
from workers.servers.cpu_ocr import cpu_ocr_api
from workers.servers.layout import layout_api

ROOT = Path(__file__).resolve().parents[2]


def cpu_ocr_app() -> Starlette:
    return cpu_ocr_api.create_app(load_settings().cpu_ocr)


def layout_app() -> Starlette:
    return layout_api.create_app(load_settings().layout, lambda: pytest.fail("loads a model"))


@pytest.mark.parametrize(
    ("make_app", "path"),
    [(cpu_ocr_app, "/v1/chat/completions"), (layout_app, "/layout"), (cpu_ocr_app, "/v1/models")],
)
@pytest.mark.parametrize("origin", ["https://attacker.example", "null", "http://127.0.0.1:8000"])
def test_a_request_of_a_web_page_is_refused(make_app, path: str, origin: str) -> None:
    # Without `with` the application does not start, so no model is loaded.
    client = TestClient(make_app())
    answer = client.post(path, headers={"Origin": origin, "Content-Type": "text/plain"})
    assert answer.status_code == 403
    assert client.options(path, headers={"Origin": origin}).status_code == 403


@pytest.mark.parametrize("name", [".gitignore", ".dockerignore"])
def test_files_with_secrets_are_left_out(name: str) -> None:
    lines = (ROOT / name).read_text().split()
    assert {".env", ".env.*"} <= {line.removeprefix("**/") for line in lines}
