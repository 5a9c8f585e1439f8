"""The examples of the README run as they are written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pymupdf
import pytest

from tests.net import free_port
from tests.service import open_service

README = Path(__file__).parents[2] / "README.md"
PROSE = "The goods were delivered to the door in the evening, and all of them were accepted there."

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def url(stack: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a service with a prepare worker, which reads born-digital documents."""
    port = free_port()
    with open_service(
        stack, tmp_path_factory.mktemp("readme"), RAG_SERVICE_API_PORT=str(port)
    ) as service:
        serve = [sys.executable, "-m", "rag_service.cli.main", "serve"]
        service.programs.start("api", serve)
        service.programs.wait_ready(service.programs.start_worker("prepare", 2))
        base = f"http://127.0.0.1:{port}"
        service.programs.wait_until(lambda: _is_live(base), "the API answers")
        yield base


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the contract of the examples."""
    document = pymupdf.open()
    for _ in range(2):
        page = document.new_page()
        for line in range(12):
            page.insert_text((72, 90 + 16 * line), PROSE)
    document.save(tmp_path / "contract.pdf")
    return tmp_path


def _is_live(base: str) -> bool:
    try:
        return httpx.get(f"{base}/health/live").is_success
    except httpx.HTTPError:
        return False


def _example(language: str) -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1
    return str(blocks[0])


def _run(argv: list[str], folder: Path, url: str) -> str:
    done = subprocess.run(
        argv,
        cwd=folder,
        env=os.environ | {"RAG_SERVICE_URL": url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_curl_example_prints_the_document(folder: Path, url: str) -> None:
    missing = [tool for tool in ("curl", "jq") if shutil.which(tool) is None]
    if missing and not os.environ.get("CI"):
        pytest.skip(f"not installed: {', '.join(missing)}")
    printed = _run(["bash", "-eu", "-c", _example("bash")], folder, url)
    assert "<!-- page 1 -->" in printed
    assert "<!-- page 2 -->" in printed
    assert PROSE in " ".join(printed.split())


def test_the_python_example_prints_the_pages(folder: Path, url: str) -> None:
    printed = _run([sys.executable, "-c", _example("python")], folder, url)
    assert printed.startswith("processed 2\n")
    assert PROSE in " ".join(printed.split())
