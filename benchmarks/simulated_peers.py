"""How full this service and other projects' clients keep the same server over the same pages.

    python -m benchmarks.simulated_peers --sdk-python PATH --olmocr-python PATH

The server is the report's (tests/simulators), a process of its own, with vLLM's gauges and its
time unscaled; every client gets a fresh one, whose answers are as long as for the others. The
service is the real OCR worker with its defaults over documents that wait in the queue: cold just
after its start, warm over the same pages again. The glmocr SDK is given one box for each page, all
of it, without computing it; it gets all documents in one call, and one document for each call.
olmocr is its own command line. So each client sends one request a page.
A run is whole, its tail included: from the first request at the server to the last answer. The
server's limit is what a fresh one takes for as many pages that all come at once. Memory is the
most of the client's process tree. Prints a table and writes results/simulated_peers.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.peers import sdk
from benchmarks.peers.boxes import WHOLE_PAGE
from benchmarks.peers.clients import (
    OLMOCR_VERSION,
    OURS,
    SERVICE,
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
from benchmarks.peers.simulated import Simulated, Times, own_answers, simulated
from benchmarks.peers.trees import cpu_seconds, memory_mib
from benchmarks.real_server import draw_all
from benchmarks.stack import RESULTS, apart, running_stack
from rag_service.states import LayoutMode
from tests.simulators.simulated_batch import REPORT

# The report's documents have nine pages.
DOCUMENTS, PAGES = 13, 9
DRAWN_DPI = 150
SDK, SDK_SINGLY = "glmocr SDK, one call", "glmocr SDK, a call each"
COLD, WARM = f"{OURS}, cold", f"{OURS}, warm"
RUN_SECONDS = 1200.0
# Looking at memory costs CPU.
LOOK_SECONDS = 2.0


@dataclass(frozen=True)
class Cost:
    """What a process tree took: the most memory at once, and CPU all in all."""

    mib: float
    cpu_seconds: float


@dataclass(frozen=True)
class Outcome:
    """One client's whole run. `limit`: the server's own pages a second for as many."""

    pages: int
    seconds: float
    pages_per_second: float
    limit: float
    share: float
    asked: int
    answered: int
    left: int
    most_open: int
    trees: dict[str, Cost]

    @property
    def wrong(self) -> str:
        """The pages that were not asked for and answered exactly once."""
        counts = {
            "lost": self.pages - self.answered,
            "doubled": self.asked - self.pages,
            "left": self.left,
        }
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count > 0)


def measure(server: Simulated, client: Client, scans: Scans) -> Outcome:
    """One client from its start to the end of its last document."""
    before = server.times()
    with client(scans) as run:
        run.let_go()
        trees = _until_ended(run)
        times = _since(before, server.times())
    return _outcome(scans.pages, times, trees)


def _since(before: Times, now: Times) -> Times:
    """What came and was answered meanwhile."""
    came, answered = now.came[len(before.came) :], now.answered[len(before.answered) :]
    return Times(came, answered, now.left - before.left)


def _outcome(pages: int, times: Times, trees: dict[str, Cost]) -> Outcome:
    own = own_answers(REPORT, pages)[-1]
    return Outcome(
        pages=pages,
        seconds=round(times.seconds, 1),
        pages_per_second=round(pages / times.seconds, 3),
        limit=round(pages / own, 3),
        share=round(own / times.seconds, 3),
        asked=len(times.came),
        answered=len(times.answered),
        left=times.left,
        most_open=_most_open(times),
        trees=trees,
    )


def _most_open(times: Times) -> int:
    """Requests that were open at once."""
    steps = [(at, 1) for at in times.came] + [(at, -1) for at in times.answered]
    open_now = most = 0
    for _, step in sorted(steps):
        open_now += step
        most = max(most, open_now)
    return most


def _until_ended(run: Run) -> dict[str, Cost]:
    """Wait for the client; what each of its trees took meanwhile. Raises TimeoutError."""
    began = {name: cpu_seconds(pids) for name, pids in run.trees.items()}
    took = dict.fromkeys(run.trees, Cost(0.0, 0.0))
    deadline = time.monotonic() + RUN_SECONDS
    while not run.ended():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{', '.join(run.trees)}: not done in {RUN_SECONDS:.0f} s.")
        for name, mib in memory_mib(run.trees).items():
            cpu = cpu_seconds(run.trees[name]) - began[name]
            # A process that is just ending takes none.
            took[name] = Cost(max(took[name].mib, mib), max(took[name].cpu_seconds, cpu))
        time.sleep(LOOK_SECONDS)
    return took


def measure_ours(scans: Scans) -> dict[str, Outcome]:
    """Cold and warm. In a process of its own: it knows one database."""
    with simulated(REPORT.name) as server:
        environment = {"GLMOCR_BASE_URL": server.url, "RAG_SERVICE_OCR_LAYOUT": LayoutMode.PAGE}
        with running_stack(durable=True, ocr=environment) as stack:
            stack.start(stack.plan.workers())
            client = Ours(stack, LayoutMode.PAGE)
            cold = measure(server, client, scans)
            _show(COLD, cold)
            with copied(scans) as again:
                warm = measure(server, client, again)
            _show(WARM, warm)
    return {COLD: cold, WARM: warm}


@contextmanager
def copied(scans: Scans) -> Iterator[Scans]:
    """The same pages in files whose bytes are their own: a known file is not read again."""
    with tempfile.TemporaryDirectory() as folder:
        yield Scans([copy(file, Path(folder) / file.name) for file in scans.files], scans.pages)


def measure_peers(peers: Peers, scans: Scans) -> dict[str, Outcome]:
    """Those that are present, each with a server of its own."""
    results = {}
    for name in (SDK, SDK_SINGLY) if peers.sdk else ():
        with simulated(REPORT.name) as server:
            assert peers.sdk is not None
            singly = name == SDK_SINGLY
            client = Sdk(name, peers.sdk, port_of(server), WHOLE_PAGE, one_by_one=singly)
            results[name] = measure(server, client, scans)
            _show(name, results[name])
    if peers.olmocr:
        with simulated(REPORT.name) as server:
            results["olmocr"] = measure(server, Olmocr(peers.olmocr, server.url), scans)
            _show("olmocr", results["olmocr"])
    return results


def port_of(server: Simulated) -> int:
    return int(server.url.rpartition(":")[2])


def _show(name: str, found: Outcome) -> None:
    trees = [tree for tree in found.trees if tree != SERVICE]
    cost = found.trees[trees[0]]
    print(
        f"{name:24} {found.seconds:8.1f} {found.pages_per_second:8.3f} {found.share:9.1%}"
        f" {found.asked:6} {found.answered:9} {found.most_open:5} {cost.mib:8.0f}"
        f" {cost.cpu_seconds:6.0f}  {found.wrong}",
        flush=True,
    )


def compare(peers: Peers, documents: int, pages: int) -> None:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        scans = Scans(draw_all(Path(folder), [pages] * documents, DRAWN_DPI), documents * pages)
        own = own_answers(REPORT, scans.pages)[-1]
        print(f"{os.cpu_count()} cores, load {load:.1f} before; {documents} documents of {pages}"
              f" pages; the server's limit {scans.pages / own:.3f}/s, {own:.1f} s")  # fmt: skip
        print(f"{'':24} {'seconds':>8} {'pages/s':>8} {'of limit':>9} {'asked':>6} {'answered':>9}"
              f" {'open':>5} {'PSS MiB':>8} {'CPU s':>6}", flush=True)  # fmt: skip
        results = apart(measure_ours, scans)
        results |= measure_peers(peers, scans)
    _end(results, peers, load, (documents, pages))


def _end(results: dict[str, Outcome], peers: Peers, load: float, size: tuple[int, int]) -> None:
    service = results[WARM].trees[SERVICE]
    print(f"Whole service with the worker, PostgreSQL and Valkey included: {service.mib:.0f} MiB")
    if peers.missing:
        print(f"Not kept, for some are absent: {peers.missing}")
        return
    peers_only = [name for name in results if name not in (COLD, WARM)]
    for name in (COLD, WARM):
        for peer in peers_only:
            ahead = results[name].share - results[peer].share
            print(f"{name} against {peer}: {ahead:+.1%} of the server's limit, wanted more than 0:"
                  f" {'met' if ahead > 0 else 'missed'}")  # fmt: skip
    if size == (DOCUMENTS, PAGES):
        keep(results, load)


def keep(results: dict[str, Outcome], load: float) -> None:
    summary = {
        "cores": os.cpu_count(), "load_before": load, "server": REPORT.name,
        "documents": DOCUMENTS, "pages_a_document": PAGES,
        "sdk": sdk.VERSION, "olmocr": OLMOCR_VERSION,
        "clients": {name: asdict(found) for name, found in results.items()},
    }  # fmt: skip
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "simulated_peers.json").write_text(json.dumps(summary, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    parser.add_argument("--pages", type=int, default=PAGES, help="a document")
    given = parser.parse_args()
    compare(Peers(given.sdk_python, given.olmocr_python), given.documents, given.pages)


if __name__ == "__main__":
    main()
