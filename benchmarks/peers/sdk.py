"""Starts the glmocr SDK's process and reads its result."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rag_service.layout.page_layout import LayoutBox

VERSION = "0.1.5"
INSTALL = f"python3 -m venv sdk && sdk/bin/pip install glmocr=={VERSION} 'pymupdf<2'"
_CLIENT = Path(__file__).with_name("sdk_client.py")
# The SDK reads settings of its own, and keys that would send it to a cloud, from these.
_ITS_OWN = ("GLMOCR_", "ZHIPU_")


def add_argument(parser: argparse.ArgumentParser) -> None:
    """The option that names the SDK's Python."""
    default = os.environ.get("RAG_SDK_PYTHON") or None
    parser.add_argument("--sdk-python", type=Path, default=default, help=INSTALL)


@dataclass(frozen=True)
class SdkJob:
    """Files for the SDK; `pages` are their boxes, page after page, from the first again after.

    `draws`: whether it paints the boxes on each page, its default.
    `one_by_one`: a call for each file, not one for all.
    """

    port: int
    files: Sequence[Path]
    pages: Sequence[Sequence[LayoutBox]]
    layout_fails: bool = False
    draws: bool = True
    one_by_one: bool = False


@dataclass(frozen=True)
class SdkResult:
    """One file as the SDK returns it: its Markdown, and its regions page by page."""

    markdown: str
    pages: list[list[dict[str, Any]]]


@dataclass(frozen=True)
class SdkAnswer:
    """What a caller of the SDK sees: an exception's text, or a result for each file."""

    error: str | None
    results: list[SdkResult]


@contextmanager
def started(python: Path, job: SdkJob) -> Iterator[subprocess.Popen[bytes]]:
    """The SDK's process at work. It is ended with the block."""
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            _command(python, job), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            cwd=folder, env=_environment(),
        ) as process,
    ):  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def run(python: Path, job: SdkJob) -> SdkAnswer:
    """What the SDK gives back for the job. Raises RuntimeError where its process fails."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            _command(python, job), capture_output=True, text=True, cwd=folder, env=_environment()
        )
    if done.returncode:
        raise RuntimeError(f"The SDK's process failed:\n{done.stderr}")
    # Its libraries print warnings before.
    answer = json.loads(done.stdout.splitlines()[-1])
    return SdkAnswer(answer["error"], [SdkResult(**result) for result in answer["results"]])


def _command(python: Path, job: SdkJob) -> list[str]:
    return [str(python.absolute()), str(_CLIENT), json.dumps(_as_json(job))]


def _as_json(job: SdkJob) -> dict[str, Any]:
    return {
        "host": "127.0.0.1",
        "port": job.port,
        "files": [str(file) for file in job.files],
        "pages": [[asdict(box) for box in boxes] for boxes in job.pages],
        "layout_fails": job.layout_fails,
        "draws": job.draws,
        "one_by_one": job.one_by_one,
    }


def _environment() -> dict[str, str]:
    """Return this environment without the SDK's settings; an empty folder keeps .env files out."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_ITS_OWN)}
