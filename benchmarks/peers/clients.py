"""Clients of an OCR server over the same documents: the real OCR worker, the glmocr SDK, olmocr."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from benchmarks import stack
from benchmarks.peers import sdk
from benchmarks.peers.boxes import NOT_READ, WHOLE_PAGE
from rag_service.layout.page_layout import LayoutBox
from rag_service.states import TERMINAL, LayoutMode, Stage
from tests.simulators.simulated_server import MODEL

OLMOCR_VERSION = "0.4.27"
OLMOCR_INSTALL = f"python3 -m venv olmocr && olmocr/bin/pip install olmocr=={OLMOCR_VERSION}"
OURS, SERVICE, OLMOCR = "ours", "ours, whole service", "olmocr"
PREPARE_SECONDS, READ_SECONDS = 120.0, 300.0
POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Scans:
    """Documents of equal pages, `pages` in all."""

    files: list[Path]
    pages: int


@dataclass(frozen=True)
class Run:
    """A client at work: what it is counted by, how many requests will come.

    `let_go` starts one that is held back; `ended` says whether it has done all its documents.
    """

    trees: Mapping[str, Sequence[int]]
    requests: int
    let_go: Callable[[], None]
    ended: Callable[[], bool]


class Client(Protocol):
    """Something that feeds the server."""

    def __call__(self, scans: Scans) -> AbstractContextManager[Run]:
        """The client over these documents; it is ended with the block."""
        ...


@dataclass(frozen=True)
class Peers:
    """The Pythons of the others' environments; None where one is absent."""

    sdk: Path | None
    olmocr: Path | None

    @property
    def missing(self) -> str:
        """How to have what is absent."""
        installs = ((self.sdk, sdk.INSTALL), (self.olmocr, OLMOCR_INSTALL))
        return "; ".join(install for python, install in installs if python is None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that name the others' Pythons."""
    sdk.add_argument(parser)
    olmocr = os.environ.get("RAG_OLMOCR_PYTHON") or None
    parser.add_argument("--olmocr-python", type=Path, default=olmocr, help=OLMOCR_INSTALL)


def copy(source: Path, target: Path) -> Path:
    """A copy whose bytes are its own, by a comment after the end: `target`."""
    shutil.copyfile(source, target)
    with target.open("ab") as end:
        end.write(f"\n% {target}\n".encode())
    return target


class Ours:
    """The running service; its OCR worker is held back until all documents wait for it."""

    def __init__(
        self,
        service: stack.Stack,
        layout: LayoutMode,
        *,
        dpi: int | None = None,
        boxes: Sequence[LayoutBox] = WHOLE_PAGE,
    ) -> None:
        self._stack = service
        options = service.options(ocr="force", priority="bulk")
        run = replace(options.run, layout=layout, dpi=dpi or options.run.dpi)
        self._options = replace(options, run=run)
        self._regions = read_regions(boxes)

    @contextmanager
    def __call__(self, scans: Scans) -> Iterator[Run]:
        pids = self._stack.trees()
        trees = {OURS: pids[stack.OCR], SERVICE: pids[stack.SERVICE]}
        with ExitStack() as held:
            held.enter_context(self._stack.held_back(Stage.OCR))
            ids = [self._stack.take_in(file, self._options) for file in scans.files]
            for document_id in ids:
                self._await_ocr(document_id)
            requests = scans.pages * self._regions
            yield Run(trees, requests, held.close, lambda: self._have_ended(ids))
        self._stack.wait(ids, READ_SECONDS)

    def _await_ocr(self, document_id: str) -> None:
        deadline = time.monotonic() + PREPARE_SECONDS
        while self._stack.view(document_id).status is not Stage.OCR.waiting:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{document_id} is not ready to be read.")
            time.sleep(POLL_SECONDS)

    def _have_ended(self, ids: Sequence[str]) -> bool:
        return all(self._stack.view(each).latest_run.status in TERMINAL for each in ids)


class Sdk:
    """The SDK as a library: all documents in one call, or `one_by_one`."""

    def __init__(
        self,
        name: str,
        python: Path,
        port: int,
        boxes: Sequence[LayoutBox],
        *,
        draws: bool = True,
        one_by_one: bool = False,
    ) -> None:
        self._name = name
        self._python = python
        self._port = port
        self._boxes = boxes
        self._draws = draws
        self._one_by_one = one_by_one

    @contextmanager
    def __call__(self, scans: Scans) -> Iterator[Run]:
        job = sdk.SdkJob(
            self._port, scans.files, [self._boxes], draws=self._draws, one_by_one=self._one_by_one
        )
        with sdk.started(self._python, job) as process:
            requests = scans.pages * read_regions(self._boxes)
            yield at_work(self._name, process, requests)


class Olmocr:
    """olmocr's command line against a server that is not its own."""

    def __init__(self, python: Path, url: str, *options: str) -> None:
        self._python = python
        self._url = url
        self._options = options

    @contextmanager
    def __call__(self, scans: Scans) -> Iterator[Run]:
        with (
            tempfile.TemporaryDirectory() as workspace,
            open(Path(workspace) / "log", "w") as log,
            subprocess.Popen(
                [
                    str(self._python.absolute()), "-m", "olmocr.pipeline", workspace,
                    "--server", f"{self._url}/v1", "--model", MODEL, *self._options,
                    "--pdfs", *map(str, scans.files),
                ],
                stdout=log, stderr=log, cwd=workspace,
            ) as process,
        ):  # fmt: skip
            try:
                yield at_work(OLMOCR, process, scans.pages)
            finally:
                process.kill()


def at_work(name: str, process: subprocess.Popen[bytes], requests: int) -> Run:
    """A process that needs no signal to begin and ends on its own."""

    def ended() -> bool:
        if process.poll():
            raise RuntimeError(f"{name} ended with {process.returncode}.")
        return process.returncode == 0

    return Run({name: [process.pid]}, requests, lambda: None, ended)


def read_regions(boxes: Sequence[LayoutBox]) -> int:
    """Requests a page by its regions."""
    return sum(box.label not in NOT_READ for box in boxes)
