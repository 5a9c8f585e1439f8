"""The CPU that clients spend to feed an OCR server, for each page from PDF to bytes sent.

    python -m benchmarks.feed [CORPUS_FOLDER] --sdk-python PATH --olmocr-python PATH

The server answers at once and reads every byte, in a process that is not counted, so what is left
is the clients' own work on this machine. The service is the real OCR worker with its default
forks, its main process and render children counted, over documents that wait in the queue; a
second line adds the rest of the service, PostgreSQL and Valkey included. The glmocr SDK gets a
page's boxes for nothing: its layout model, which is most of its cost, is left out. olmocr is its
own command line. Start-up is left out for all: the clock starts when a client has asked the
server its first question, the service when its queue is released, and ends with the last page's
last byte. By default the SDK paints the boxes on every page, so it is measured with and without.
The pages are the corpus' scans of about A4 or Letter, joined, once for each document. Prints
tables and writes benchmarks/results/feed.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.corpus import MANIFEST, default_folder, read_manifest
from benchmarks.peers import sdk
from benchmarks.peers.boxes import ORDINARY_PAGE, WHOLE_PAGE
from benchmarks.peers.clients import (
    OLMOCR_VERSION,
    OURS,
    Client,
    Olmocr,
    Ours,
    Peers,
    Run,
    Scans,
    Sdk,
    add_arguments,
    copy,
)
from benchmarks.peers.instant import InstantServer
from benchmarks.peers.trees import cpu_seconds, memory_mib
from benchmarks.stack import RESULTS, Stack, apart, running_stack
from rag_service.layout.page_layout import LayoutBox
from rag_service.states import LayoutMode

ROUNDS = 3
# As many as the OCR worker has forks; olmocr takes one page after the other from however many.
DOCUMENTS, OLMOCR_DOCUMENTS = 8, 2
LONG_SIDE_POINTS = (740, 860)
START_SECONDS = 120.0
ROUND_SECONDS = 300.0
POLL_SECONDS = 0.01
# Looking at memory costs CPU, which the clients would miss.
MEMORY_SECONDS = 2.0
EQUAL_DPI = 200
# Letter at that resolution; olmocr is given the long side of its pictures.
EQUAL_LONG_SIDE = 11 * EQUAL_DPI
SDK, SDK_PLAIN = "glmocr SDK", "glmocr SDK, no drawing"
SHIPPED = "as shipped"
MOST_CPU, LEAST_SPEED = 0.5, 3.0


@dataclass(frozen=True)
class Round:
    """One client's cost for all pages once."""

    cpu_ms: float
    pages_per_second: float
    mib: float
    kib_per_page: float


@dataclass(frozen=True)
class Entry:
    """A client and the documents that it gets."""

    client: Client
    documents: int = DOCUMENTS


@dataclass(frozen=True)
class Row:
    """Clients beside each other under one set of conditions."""

    name: str
    source: Path
    entries: Sequence[Entry]


def gather(corpus: Path, target: Path, *, colour: bool) -> int:
    """Join the scans of about A4 or Letter; with `colour` each page gets a red stamp. The pages."""
    from rag_service.pdf.child.mupdf import pymupdf

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
    """Return copies of the document."""
    from rag_service.pdf.child.mupdf import pymupdf

    with pymupdf.open(source) as document:
        pages = document.page_count
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        files = [copy(source, Path(folder) / f"scan-{number}.pdf") for number in range(count)]
        yield Scans(files, pages * count)


class HeldBack:
    """A process that waits at its first question to the server until it is released."""

    def __init__(self, client: Client, server: InstantServer) -> None:
        self._client = client
        self._server = server

    @contextmanager
    def __call__(self, scans: Scans) -> Iterator[Run]:
        self._server.arm()
        with self._client(scans) as run:
            self._server.await_client(START_SECONDS)
            yield replace(run, let_go=self._server.open)


def measure(server: InstantServer, entry: Entry, source: Path) -> dict[str, Round]:
    """One round of one client, by each of the names it is counted under."""
    with copies(source, entry.documents) as scans, entry.client(scans) as run:
        server.forget()
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
        for entry in row.entries:
            for name, one in measure(server, entry, row.source).items():
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


def sdk_entry(
    name: str, python: Path, server: InstantServer, boxes: Sequence[LayoutBox], *, draws: bool
) -> Entry:
    return Entry(HeldBack(Sdk(name, python, server.port, boxes, draws=draws), server))


def olmocr_entry(python: Path, server: InstantServer, *options: str) -> Entry:
    return Entry(HeldBack(Olmocr(python, server.url, *options), server), OLMOCR_DOCUMENTS)


def shipped(stack: Stack, server: InstantServer, peers: Peers, folder: Path) -> Row:
    """Everyone as it comes out of the box."""
    entries = [Entry(Ours(stack, stack.settings.ocr.layout))]
    if peers.sdk:
        entries.append(sdk_entry(SDK, peers.sdk, server, ORDINARY_PAGE, draws=True))
        entries.append(sdk_entry(SDK_PLAIN, peers.sdk, server, ORDINARY_PAGE, draws=False))
    if peers.olmocr:
        entries.append(olmocr_entry(peers.olmocr, server))
    return Row(SHIPPED, folder / "scans.pdf", entries)


def whole_pages(stack: Stack, server: InstantServer, peers: Peers, folder: Path) -> Row:
    """All at one resolution, in colour; olmocr has no JPEG."""
    entries = [Entry(Ours(stack, LayoutMode.PAGE, dpi=EQUAL_DPI))]
    if peers.sdk:
        entries.append(sdk_entry(SDK_PLAIN, peers.sdk, server, WHOLE_PAGE, draws=False))
    if peers.olmocr:
        long_side = ("--target_longest_image_dim", str(EQUAL_LONG_SIDE))
        entries.append(olmocr_entry(peers.olmocr, server, *long_side))
    return Row(f"whole pages at {EQUAL_DPI} DPI in colour", folder / "colour.pdf", entries)


def regions(stack: Stack, server: InstantServer, peers: Peers, folder: Path) -> Row:
    """The same regions of the same pages; the others have none."""
    service = Ours(stack, LayoutMode.REGIONS, dpi=EQUAL_DPI, boxes=ORDINARY_PAGE)
    entries = [Entry(service)]
    if peers.sdk:
        entries.append(sdk_entry(SDK_PLAIN, peers.sdk, server, ORDINARY_PAGE, draws=False))
    return Row(f"regions at {EQUAL_DPI} DPI in colour", folder / "colour.pdf", entries)


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
            results |= apart(measure_rows, makers, given_layout, peers, folder)
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
    """Whether the service is as much cheaper and faster than the SDK as it should be."""
    service, theirs = median(found[OURS]), median(found[SDK])
    cpu = service.cpu_ms / theirs.cpu_ms
    speed = service.pages_per_second / theirs.pages_per_second
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
    add_arguments(parser)
    given = parser.parse_args()
    if not (given.corpus / MANIFEST).exists():
        sys.exit(f"{given.corpus}: name the corpus folder or set RAG_CORPUS.")
    compare(given.corpus, Peers(given.sdk_python, given.olmocr_python))


if __name__ == "__main__":
    main()
