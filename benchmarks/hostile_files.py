"""Hostile and damaged files among ordinary documents: what they cost the others, and memory.

    python -m benchmarks.hostile_files FOLDER ... [--files 150] [--seed 1]

Takes the files of folders, evenly from each folder below, and one of each kind of tests/fakes/
bombs.py. They go through the whole service over HTTP: API, shipped workers, a simulated OCR server
at an H200's rates. An ordinary document of three pages goes in after every second file, and the
same number goes in once without the files, in the same run. Prints what became of each file, the
ordinary documents' waits with and without them, and the largest memory of the API and of each
render child. Writes results/hostile_files.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
import psutil

from benchmarks.peers.simulated import simulated
from benchmarks.peers.trees import family
from benchmarks.stack import RESULTS, Stack, apart, running_stack
from rag_service.cli.start_plan import API
from rag_service.states import TERMINAL, LayoutMode, RunState
from tests.fakes.bombs import KINDS
from tests.fakes.pdf_samples import text_document

SERVER = "h200"
FILES_PER_ORDINARY = 2
ORDINARY_PAGES = 3
LOOK_SECONDS = 0.25
SLOW_SECONDS = 60.0
END_SECONDS = 3000.0
REQUEST = httpx.Timeout(120)
KIB_PER_MIB = 1024
RENDER_CHILD = "rag_service.pdf.child"
# Codes that say that the service, not the file, was at fault.
OWN_FAULTS = frozenset({"internal", "worker_crashed", "document_timeout"})


@dataclass(frozen=True)
class Sent:
    """A file and what became of it: `refused` at intake, else its document's end."""

    name: str
    bytes: int
    ordinary: bool
    refused: str | None = None
    document_id: str = ""


@dataclass(frozen=True)
class Ended:
    """A document's end: seconds from its acceptance; pages by state; warnings by code."""

    name: str
    ordinary: bool
    outcome: str
    message: str
    seconds: float
    pages: int
    failed_pages: int
    warnings: list[str]


@dataclass(frozen=True)
class Outcome:
    """One pass: all ends, the largest memory in MiB by process, what health said and how often."""

    ended: list[Ended]
    seconds: float
    api_mib: float
    child_mib: list[float]
    health: dict[str, int]
    restarts: list[str]

    def waits(self) -> list[float]:
        return sorted(each.seconds for each in self.ended if each.ordinary)


@dataclass
class Watch:
    """Looks at memory and health until it is stopped; a process's peak is the kernel's own."""

    stack: Stack
    url: str
    peaks: dict[tuple[str, int], float] = field(default_factory=dict)
    health: Counter[str] = field(default_factory=Counter)

    def look(self) -> None:
        trees = [program.pid for program in self.stack.programs() if program.pid]
        api = {program.pid for program in self.stack.programs() if program.name == API}
        for process in family(trees):
            with contextlib.suppress(psutil.Error, OSError):
                kind = "api" if process.pid in api else self._kind(process)
                key = (kind, process.pid)
                self.peaks[key] = max(self.peaks.get(key, 0.0), peak_mib(process.pid))
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(f"{self.url}/health/ready", timeout=5, trust_env=False)
            said = answer.json()
            self.health[f"{answer.status_code} {' '.join(map(str, said.get('degraded', [])))}"] += 1

    @staticmethod
    def _kind(process: psutil.Process) -> str:
        return "child" if RENDER_CHILD in " ".join(process.cmdline()) else "other"

    @contextmanager
    def running(self) -> Iterator[None]:
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(LOOK_SECONDS):
                self.look()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def peak_mib(pid: int) -> float:
    """The most resident memory that the process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) / KIB_PER_MIB for line in lines if line.startswith("VmHWM")),
                0.0)  # fmt: skip


def choose(folders: Sequence[Path], most: int, dice: random.Random) -> list[Path]:
    """Return files of the folders, as many from each folder below them as there are."""
    groups: dict[Path, list[Path]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                group = path.relative_to(folder).parts[0]
                groups.setdefault(folder / group, []).append(path)
    for paths in groups.values():
        dice.shuffle(paths)
    chosen: list[Path] = []
    while len(chosen) < most and any(groups.values()):
        chosen += [paths.pop() for paths in groups.values() if paths][: most - len(chosen)]
    return chosen


def make_bombs(folder: Path) -> list[Path]:
    folder.mkdir()
    for name, make in KINDS.items():
        (folder / name).write_bytes(make())
    return sorted(folder.iterdir())


def make_ordinary(folder: Path, count: int) -> list[Path]:
    folder.mkdir()
    return [
        text_document(folder / f"ordinary-{number:03}.pdf", ORDINARY_PAGES)
        for number in range(count)
    ]


def interleaved(hostile: Sequence[Path], ordinary: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    others = iter(ordinary)
    for number, path in enumerate(hostile, start=1):
        yield path, False
        if number % FILES_PER_ORDINARY == 0:
            yield next(others), True


def send(client: httpx.Client, path: Path, ordinary: bool) -> Sent:
    size = path.stat().st_size
    with path.open("rb") as body:
        answer = client.post("/documents", files={"file": (path.name, body)})
    if answer.is_success:
        return Sent(path.name, size, ordinary, None, answer.json()["id"])
    return Sent(path.name, size, ordinary, f"{answer.status_code} {answer.json()['code']}")


def ends(stack: Stack, sent: Sequence[Sent]) -> list[Ended]:
    """What became of every file; waits until all documents have ended."""
    deadline = time.monotonic() + END_SECONDS
    found = []
    for one in sent:
        if one.refused:
            found.append(Ended(one.name, one.ordinary, one.refused, "", 0.0, 0, 0, []))
            continue
        while (view := stack.view(one.document_id)).latest_run.status not in TERMINAL:
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)
        ended_at = view.finished_at.timestamp() if view.finished_at else time.time()
        found.append(
            Ended(
                name=one.name,
                ordinary=one.ordinary,
                outcome=f"failed {view.error.code}" if view.error else view.status.value,
                message=view.error.message if view.error else "",
                seconds=ended_at - view.created_at.timestamp(),
                pages=view.pages.total or 0,
                failed_pages=view.pages.failed,
                warnings=sorted({warning.code for warning in view.warnings}),
            )
        )
    return found


def measure(files: Sequence[tuple[Path, bool]]) -> Outcome:
    """One pass of the files through a service of its own."""
    with simulated(SERVER) as server:
        environment = {
            "GLMOCR_BASE_URL": server.url,
            "RAG_SERVICE_OCR_LAYOUT": LayoutMode.PAGE.value,
        }
        with running_stack(durable=True, ocr=environment) as stack:
            url = stack.plan.api_url()
            stack.start([*stack.plan.workers(), stack.plan.api()])
            watch = Watch(stack, url)
            began = time.monotonic()
            with watch.running(), httpx.Client(
                base_url=url, timeout=REQUEST, trust_env=False
            ) as client:  # fmt: skip
                sent = [send(client, path, ordinary) for path, ordinary in files]
                ended = ends(stack, sent)
            return Outcome(
                ended=ended,
                seconds=time.monotonic() - began,
                api_mib=max((mib for (kind, _), mib in watch.peaks.items() if kind == "api")),
                child_mib=sorted(mib for (kind, _), mib in watch.peaks.items() if kind == "child"),
                health=dict(watch.health),
                restarts=[f"{p.name}: {p.restarts}" for p in stack.programs() if p.restarts],
            )


def show(outcome: Outcome, alone: Outcome) -> None:
    """All figures of the two passes."""
    hostile = [each for each in outcome.ended if not each.ordinary]
    print(f"\n{len(hostile)} hostile files, {len(outcome.waits())} ordinary documents of "
          f"{ORDINARY_PAGES} pages, {outcome.seconds:.0f} s")  # fmt: skip
    for name, count in Counter(each.outcome for each in hostile).most_common():
        print(f"  {count:5}  {name}")
    print("\n  ordinary documents      processed   median   longest wait")
    for title, one in (("without the files", alone), ("among the files", outcome)):
        good = sum(each.ordinary and each.outcome == RunState.PROCESSED for each in one.ended)
        waits = one.waits()
        print(f"  {title:22} {good:4} of {len(waits):4} {statistics.median(waits):7.1f}s "
              f"{waits[-1]:10.1f}s")  # fmt: skip
    print(
        f"\n  most memory: API {outcome.api_mib:.0f} MiB (without {alone.api_mib:.0f}); "
        f"render children {', '.join(f'{mib:.0f}' for mib in outcome.child_mib[-6:])} MiB"
    )
    print(f"  health: {outcome.health}")
    print(f"  restarts: {', '.join(outcome.restarts) or 'none'}")
    print("\n  files that took more than a minute, or failed by a fault of the service")
    for each in sorted(hostile, key=lambda one: -one.seconds):
        if each.seconds > SLOW_SECONDS or is_own_fault(each):
            print(f"  {each.seconds:7.1f}s {each.pages:6} pages  {each.outcome:28} {each.name}")


def is_own_fault(ended: Ended) -> bool:
    words = ended.outcome.split()
    return words[-1] in OWN_FAULTS or words[0] not in {"processed", "failed", "422", "413", "415"}


def keep(outcome: Outcome, alone: Outcome) -> None:
    summary = {
        "cores": os.cpu_count(),
        "server": SERVER,
        "without": asdict(alone) | {"ended": len(alone.ended), "waits": alone.waits()},
        "among": asdict(outcome) | {"waits": outcome.waits()},
    }
    rounded = json.loads(json.dumps(summary), parse_float=lambda text: round(float(text), 2))
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "hostile_files.json").write_text(json.dumps(rounded, indent=1) + "\n")


def measure_both(folders: Sequence[Path], most: int, seed: int) -> tuple[Outcome, Outcome]:
    with tempfile.TemporaryDirectory() as name:
        hostile = [*choose(folders, most, random.Random(seed)), *make_bombs(Path(name) / "bombs")]
        random.Random(seed).shuffle(hostile)
        ordinary = make_ordinary(Path(name) / "ordinary", len(hostile) // FILES_PER_ORDINARY)
        alone = apart(measure, [(path, True) for path in ordinary])
        return apart(measure, list(interleaved(hostile, ordinary))), alone


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, help="folders of files")
    parser.add_argument("--files", type=int, default=150, help="how many files of the folders")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    outcome, alone = measure_both(given.folders, given.files, given.seed)
    show(outcome, alone)
    keep(outcome, alone)


if __name__ == "__main__":
    main()
