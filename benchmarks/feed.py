"""What it costs to feed an OCR server: CPU a page from PDF to bytes on the wire, ours and others'.

    python -m benchmarks.feed [CORPUS_FOLDER] --sdk-python PATH --olmocr-python PATH

The server answers at once and reads every byte, in a process that is not counted, so what is left
is the clients' own work on this machine. Ours is the real OCR worker with its shipped number of
forks, its main process and render children counted, over documents that wait in the queue; a
second line adds the rest of the service, PostgreSQL and Valkey included. The glmocr SDK gets a
page's boxes for nothing: its layout model, which is most of its cost, is left out. olmocr is its
own command line. Start-up is left out for all: the clock starts when a client has asked the
server its first question, ours when its queue is let go, and ends with the last page's last byte.
By itself the SDK paints the boxes on every page, so it is measured with and without.
The pages are the corpus' scans of about A4 or Letter, joined, so many times as documents. Prints
tables and writes benchmarks/results/feed.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

from benchmarks.corpus import MANIFEST, default_folder, read_manifest
from benchmarks.peers import sdk
from benchmarks.peers.boxes import NOT_READ, ORDINARY_PAGE, WHOLE_PAGE
from benchmarks.peers.instant import MODEL, InstantServer
from benchmarks.peers.trees import cpu_seconds, memory_mib
from benchmarks.stack import RESULTS, Stack, running_stack
from rag_service.layout.types import Box
from rag_service.states import LayoutMode, Stage

ROUNDS = 3
# As many as the OCR worker has forks; olmocr takes one page after the other from however many.
DOCUMENTS, OLMOCR_DOCUMENTS = 8, 2
LONG_SIDE_POINTS = (740, 860)
START_SECONDS = 120.0
ROUND_SECONDS = 300.0
POLL_SECONDS = 0.01
# Looking at memory costs CPU, which the clients would miss.
MEMORY_SECONDS = 2.0
OLMOCR_VERSION = "0.4.27"
OLMOCR_INSTALL = f"python3 -m venv olmocr && olmocr/bin/pip install olmocr=={OLMOCR_VERSION}"
EQUAL_DPI = 200
# Letter at that resolution; olmocr is told the long side of its pictures.
EQUAL_LONG_SIDE = 11 * EQUAL_DPI
OURS, SERVICE, OLMOCR = "ours", "ours, whole service", "olmocr"
SDK, SDK_PLAIN = "glmocr SDK", "glmocr SDK, no drawing"
SHIPPED = "as shipped"
MOST_CPU, LEAST_SPEED = 0.5, 3.0


@dataclass(frozen=True)
class Scans:
    """Documents of equal pages."""

    files: list[Path]
    pages: int


@dataclass(frozen=True)
class Round:
    """One client's cost for all pages once."""

    cpu_ms: float
    pages_per_second: float
    mib: float
    kib_per_page: float


@dataclass(frozen=True)
class Run:
    """A client at work: what it is counted by, how many requests will come, how to let it go."""

    trees: Mapping[str, Sequence[int]]
    requests: int
    let_go: Callable[[], None]


class Client(Protocol):
    """Something that feeds the server."""

    documents: int

    def __call__(self, scans: Scans) -> AbstractContextManager[Run]:
        """The client started and held back, over these documents."""
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


@dataclass(frozen=True)
class Row:
    """Clients beside each other under one set of conditions."""

    name: str
    source: Path
    clients: Sequence[Client]


def gather(corpus: Path, target: Path, *, colour: bool) -> int:
    """Join the scans of about A4 or Letter; with `colour` each page gets a red stamp. The pages."""
    from rag_service.pdf.mupdf import pymupdf

    least, most = LONG_SIDE_POINTS
    with pymupdf.open() as whole:
        for file in read_manifest(corpus):
            if file.kind != "scan_gt" or file.path.suffix != ".pdf":
                continue
            with pymupdf.open(file.path) as document:
                for page in document:
                    if least <= max(page.rect.width, page.rect.height) <= most:
                        whole.insert_pdf(document, from_page=page.number, to_page=page.number)
        for page in whole if colour else ():
            page.draw_rect((20, 20, 80, 50), color=(1, 0, 0), fill=(1, 0, 0))
        whole.save(target, garbage=3, deflate=True)
        return int(whole.page_count)


@contextmanager
def copies(source: Path, count: int) -> Iterator[Scans]:
    """The document so many times. A comment after the end makes each copy's bytes its own."""
    from rag_service.pdf.mupdf import pymupdf

    with pymupdf.open(source) as document:
        pages = document.page_count
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        files = [Path(folder) / f"scan-{number}.pdf" for number in range(count)]
        for file in files:
            shutil.copyfile(source, file)
            with file.open("ab") as end:
                end.write(f"\n% {file}\n".encode())
        yield Scans(files, pages * count)


class Ours:
    """The running service; its OCR worker is held back until all documents wait for it."""

    documents = DOCUMENTS

    def __init__(
        self,
        stack: Stack,
        server: InstantServer,
        layout: LayoutMode,
        *,
        dpi: int | None = None,
        boxes: Sequence[Box] = WHOLE_PAGE,
    ) -> None:
        self._stack = stack
        self._server = server
        options = stack.options(ocr="force", priority="bulk")
        run = replace(options.run, layout=layout, dpi=dpi or options.run.dpi)
        self._options = replace(options, run=run)
        self._regions = read_regions(boxes)

    @contextmanager
    def __call__(self, scans: Scans) -> Iterator[Run]:
        pids = {program.name: program.pid for program in self._stack.programs() if program.pid}
        trees = {OURS: [pids[Stage.OCR]], SERVICE: list(pids.values())}
        with ExitStack() as held:
            held.enter_context(self._stack.held_back(Stage.OCR))
            ids = [self._stack.take_in(file, self._options) for file in scans.files]
            for document_id in ids:
                self._await_ocr(document_id)
            self._server.forget()
            yield Run(trees, scans.pages * self._regions, held.close)
        self._stack.wait(ids, ROUND_SECONDS)

    def _await_ocr(self, document_id: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while self._stack.view(document_id).status is not Stage.OCR.waiting:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{document_id} is not ready to be read.")
            time.sleep(POLL_SECONDS)


class Sdk:
    """The SDK as a library, all documents in one call."""

    documents = DOCUMENTS

    def __init__(
        self, name: str, python: Path, server: InstantServer, boxes: Sequence[Box], *, draws: bool
    ) -> None:
        self._name = name
        self._python = python
        self._server = server
        self._boxes = boxes
        self._draws = draws

    @contextmanager
    def __call__(self, scans: Scans) -> Iterator[Run]:
        self._server.arm()
        job = sdk.SdkJob(self._server.port, scans.files, [self._boxes], draws=self._draws)
        with sdk.started(self._python, job) as pid:
            self._server.await_client(START_SECONDS)
            requests = scans.pages * read_regions(self._boxes)
            yield Run({self._name: [pid]}, requests, self._server.open)


class Olmocr:
    """olmocr's command line against a server that is not its own."""

    documents = OLMOCR_DOCUMENTS

    def __init__(self, python: Path, server: InstantServer, *options: str) -> None:
        self._python = python
        self._server = server
        self._options = options

    @contextmanager
    def __call__(self, scans: Scans) -> Iterator[Run]:
        self._server.arm()
        with (
            tempfile.TemporaryDirectory() as workspace,
            open(Path(workspace) / "log", "w") as log,
            subprocess.Popen(
                [
                    str(self._python.absolute()), "-m", "olmocr.pipeline", workspace,
                    "--server", f"{self._server.url}/v1", "--model", MODEL, *self._options,
                    "--pdfs", *map(str, scans.files),
                ],
                stdout=log, stderr=log, cwd=workspace,
            ) as process,
        ):  # fmt: skip
            try:
                self._server.await_client(START_SECONDS)
                yield Run({OLMOCR: [process.pid]}, scans.pages, self._server.open)
            finally:
                process.kill()


def read_regions(boxes: Sequence[Box]) -> int:
    """Requests a page by its regions."""
    return sum(box.label not in NOT_READ for box in boxes)


def measure(server: InstantServer, client: Client, source: Path) -> dict[str, Round]:
    """One round of one client, by each of the names it is counted under."""
    with copies(source, client.documents) as scans, client(scans) as run:
        before = {name: cpu_seconds(pids) for name, pids in run.trees.items()}
        started = time.monotonic()
        run.let_go()
        peaks = _until_all_came(server, run)
        seen = server.seen()
        seconds = seen.last - started
        after = {name: cpu_seconds(pids) for name, pids in run.trees.items()}
    if seen.requests != run.requests:
        raise AssertionError(f"{seen.requests} requests came, not {run.requests}.")
    return {
        name: Round(
            cpu_ms=(after[name] - before[name]) / scans.pages * 1000,
            pages_per_second=scans.pages / seconds,
            mib=peaks[name],
            kib_per_page=seen.bytes / scans.pages / 1024,
        )
        for name in run.trees
    }


def _until_all_came(server: InstantServer, run: Run) -> dict[str, float]:
    """Wait for the last request; the most memory that each tree had. Raises TimeoutError."""
    peaks = dict.fromkeys(run.trees, 0.0)
    deadline = time.monotonic() + ROUND_SECONDS
    look_at = 0.0
    while server.seen().requests < run.requests:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{server.seen().requests} of {run.requests} requests came.")
        if time.monotonic() >= look_at:
            for name, mib in memory_mib(run.trees).items():
                peaks[name] = max(peaks[name], mib)
            look_at = time.monotonic() + MEMORY_SECONDS
        time.sleep(POLL_SECONDS)
    return peaks


def measure_row(server: InstantServer, row: Row) -> dict[str, list[Round]]:
    """All rounds of all clients, round by round, so that a slow moment hits all of them."""
    found: dict[str, list[Round]] = {}
    for _ in range(ROUNDS):
        for client in row.clients:
            for name, one in measure(server, client, row.source).items():
                found.setdefault(name, []).append(one)
    return found


def median(rounds: Sequence[Round]) -> Round:
    """Figure by figure."""
    each = [asdict(one) for one in rounds]
    return Round(**{key: statistics.median(one[key] for one in each) for key in each[0]})


def show(row: Row, found: Mapping[str, Sequence[Round]]) -> None:
    """Print one row's table."""
    print(f"\n{row.name}")
    print(f"{'':24} {'CPU ms/page':>12} {'pages/s':>8} {'PSS MiB':>8} {'KiB/page':>9}   rounds")
    for name, rounds in found.items():
        middle = median(rounds)
        each = ", ".join(f"{one.cpu_ms:.0f} at {one.pages_per_second:.1f}/s" for one in rounds)
        print(
            f"{name:24} {middle.cpu_ms:12.0f} {middle.pages_per_second:8.2f} {middle.mib:8.0f}"
            f" {middle.kib_per_page:9.0f}   {each}",
            flush=True,
        )


def shipped(stack: Stack, server: InstantServer, peers: Peers, folder: Path) -> Row:
    """Everyone as it comes out of the box."""
    clients: list[Client] = [Ours(stack, server, stack.settings.ocr.layout)]
    if peers.sdk:
        clients.append(Sdk(SDK, peers.sdk, server, ORDINARY_PAGE, draws=True))
        clients.append(Sdk(SDK_PLAIN, peers.sdk, server, ORDINARY_PAGE, draws=False))
    if peers.olmocr:
        clients.append(Olmocr(peers.olmocr, server))
    return Row(SHIPPED, folder / "scans.pdf", clients)


def whole_pages(stack: Stack, server: InstantServer, peers: Peers, folder: Path) -> Row:
    """All at one resolution, in colour; olmocr has no JPEG."""
    clients: list[Client] = [Ours(stack, server, LayoutMode.PAGE, dpi=EQUAL_DPI)]
    if peers.sdk:
        clients.append(Sdk(SDK_PLAIN, peers.sdk, server, WHOLE_PAGE, draws=False))
    if peers.olmocr:
        long_side = ("--target_longest_image_dim", str(EQUAL_LONG_SIDE))
        clients.append(Olmocr(peers.olmocr, server, *long_side))
    return Row(f"whole pages at {EQUAL_DPI} DPI in colour", folder / "colour.pdf", clients)


def regions(stack: Stack, server: InstantServer, peers: Peers, folder: Path) -> Row:
    """The same regions of the same pages; the others have none."""
    ours = Ours(stack, server, LayoutMode.REGIONS, dpi=EQUAL_DPI, boxes=ORDINARY_PAGE)
    clients: list[Client] = [ours]
    if peers.sdk:
        clients.append(Sdk(SDK_PLAIN, peers.sdk, server, ORDINARY_PAGE, draws=False))
    return Row(f"regions at {EQUAL_DPI} DPI in colour", folder / "colour.pdf", clients)


# Rows that share a running service, and whether that gets the boxes of its pages given too.
Maker = Callable[[Stack, InstantServer, Peers, Path], Row]
SERVICES: Sequence[tuple[Sequence[Maker], bool]] = (
    ((shipped, whole_pages), False),
    ((regions,), True),
)


def measure_rows(
    makers: Sequence[Maker], given_layout: bool, peers: Peers, folder: Path
) -> dict[str, dict[str, list[Round]]]:
    """The rows' figures, printed as they come. In a process of its own: it knows one database."""
    results = {}
    with InstantServer() as server:
        environment = {"GLMOCR_BASE_URL": server.url}
        if given_layout:
            environment["RAG_SERVICE_LAYOUT_URL"] = server.url
        with running_stack(durable=True, ocr=environment) as stack:
            stack.start(stack.plan.workers())
            for make in makers:
                row = make(stack, server, peers, folder)
                results[row.name] = measure_row(server, row)
                show(row, results[row.name])
    return results


def compare(corpus: Path, peers: Peers) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pages = gather(corpus, folder / "scans.pdf", colour=False)
        gather(corpus, folder / "colour.pdf", colour=True)
        load = os.getloadavg()[0]
        print(f"{os.cpu_count()} cores, load {load:.1f} before; documents of {pages} pages: "
              f"{DOCUMENTS}, {OLMOCR_DOCUMENTS} for olmocr; medians of {ROUNDS}",
              flush=True)  # fmt: skip
        results: dict[str, dict[str, list[Round]]] = {}
        for makers, given_layout in SERVICES:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                job = pool.submit(measure_rows, makers, given_layout, peers, folder)
                results |= job.result()
    print()
    if peers.missing:
        print(f"Not kept, for some are absent: {peers.missing}")
        return
    verdict(results[SHIPPED])
    keep(results, load, pages)


def keep(results: Mapping[str, Mapping[str, Sequence[Round]]], load: float, pages: int) -> None:
    summary = {
        "cores": os.cpu_count(), "load_before": load, "rounds": ROUNDS,
        "documents": DOCUMENTS, "olmocr_documents": OLMOCR_DOCUMENTS, "pages_a_document": pages,
        "sdk": sdk.VERSION, "olmocr": OLMOCR_VERSION,
        "rows": {name: _as_json(found) for name, found in results.items()},
    }  # fmt: skip
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "feed.json").write_text(json.dumps(summary, indent=1) + "\n")


def verdict(found: Mapping[str, Sequence[Round]]) -> None:
    """Whether ours is as much cheaper and faster than the SDK as it should be."""
    ours, theirs = median(found[OURS]), median(found[SDK])
    cpu = ours.cpu_ms / theirs.cpu_ms
    speed = ours.pages_per_second / theirs.pages_per_second
    for what, value, wanted, met in (
        ("CPU", cpu, f"at most {MOST_CPU}", cpu <= MOST_CPU),
        ("pages/s", speed, f"at least {LEAST_SPEED}", speed >= LEAST_SPEED),
    ):
        print(f"{what} of the SDK's: {value:.2f}, wanted {wanted}: {'met' if met else 'missed'}")


def _as_json(found: Mapping[str, Sequence[Round]]) -> dict[str, Any]:
    return {
        name: {"median": asdict(median(each)), "rounds": [asdict(one) for one in each]}
        for name, each in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("corpus", nargs="?", type=Path, default=default_folder())
    sdk.add_argument(parser)
    olmocr = os.environ.get("RAG_OLMOCR_PYTHON") or None
    parser.add_argument("--olmocr-python", type=Path, default=olmocr, help=OLMOCR_INSTALL)
    given = parser.parse_args()
    if not (given.corpus / MANIFEST).exists():
        sys.exit(f"{given.corpus}: name the corpus folder or set RAG_CORPUS.")
    compare(given.corpus, Peers(given.sdk_python, given.olmocr_python))


if __name__ == "__main__":
    main()
