"""How long ordinary documents wait beside documents whose pages never end, with real workers.

    python -m benchmarks.hostile_pages

200 ordinary documents (three pages of text) are added, then again the same with twenty hostile ones
among them: forms, drawings, patterns and soft masks that contain each other, of 2, 40 and 5,000
pages. API, maintenance and both workers run on two cores, with their defaults. Prints the longest
wait of an ordinary document in both runs, what health and the summary said meanwhile, and what
became of the hostile documents in the time given. Writes benchmarks/results/hostile_pages.json.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx

from benchmarks.stack import RESULTS, Stack, apart, running_stack
from rag_service.knowledgebase.views import DocumentView
from rag_service.states import TERMINAL
from tests.fakes.nested_pages import nested
from tests.fakes.ocr_server import FakeOcrServer

ORDINARY, HOSTILE = 200, 20
KINDS = ("text", "drawing", "pattern", "soft_mask")
PAGES = (40, 2, 40, 5000, 40)
CORES = 2
POLL_SECONDS = 2.0
# For the ordinary documents, and for the hostile ones after these.
ORDINARY_SECONDS, HOSTILE_SECONDS = 240.0, 120.0


@dataclass
class Said:
    """What a look at the service said: names of faults, and messages of stages that are held."""

    looks: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    held: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Outcome:
    """Waits are in seconds, from the upload to the end of the run."""

    hostile: int
    ordinary_processed: int
    longest_wait: float
    median_wait: float
    last_ended_after: float
    hostile_ended: int
    hostile_pages_done: int
    hostile_errors: dict[str, int]
    looks: int
    faults: dict[str, int]
    held: dict[str, int]


def measure(hostile: int) -> Outcome:
    """Run the service over the documents. Runs in a process of its own."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    with FakeOcrServer() as ocr, running_stack(durable=True, ocr={"GLMOCR_BASE_URL": ocr.url}) as s:
        s.start([*s.plan.workers(), s.plan.api()])
        return _measure(s, hostile)


def _measure(stack: Stack, hostile: int) -> Outcome:
    folder = stack.folder / "inputs"
    folder.mkdir()
    ordinary, bad = list[str](), list[str]()
    began, options = time.monotonic(), stack.options()
    for number in range(ORDINARY):
        if number % (ORDINARY // HOSTILE) == 0 and len(bad) < hostile:
            bad.append(stack.take_in(_hostile(folder, len(bad)), options))
        ordinary.append(stack.take_in(_ordinary(folder, number), options))
    said = Said()
    ended = _watch(stack, ordinary, said, ORDINARY_SECONDS)
    last = time.monotonic() - began
    _watch(stack, bad, said, HOSTILE_SECONDS)
    waits = [_wait(view) for view in ended]
    views = [stack.view(document_id) for document_id in bad]
    return Outcome(
        hostile=hostile,
        ordinary_processed=sum(view.status == "processed" for view in ended),
        longest_wait=round(max(waits), 1),
        median_wait=round(statistics.median(waits), 1),
        last_ended_after=round(last, 1),
        hostile_ended=sum(view.latest_run.status in TERMINAL for view in views),
        hostile_pages_done=sum(view.pages.done for view in views),
        hostile_errors=dict(Counter(view.error.code if view.error else "none" for view in views)),
        looks=said.looks,
        faults=dict(said.faults),
        held=dict(said.held),
    )


def _wait(view: DocumentView) -> float:
    if view.finished_at is None:
        return ORDINARY_SECONDS
    return (view.finished_at - view.created_at).total_seconds()


def _watch(stack: Stack, ids: Sequence[str], said: Said, seconds: float) -> list[DocumentView]:
    """Look at the service until the documents have ended or the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        _look(stack, said)
        views = [stack.view(document_id) for document_id in ids]
        if all(view.latest_run.status in TERMINAL for view in views):
            return views
        if time.monotonic() > deadline:
            return views
        time.sleep(POLL_SECONDS)


def _look(stack: Stack, said: Said) -> None:
    url = stack.plan.api_url()
    health = httpx.get(f"{url}/health/ready", timeout=60).json()
    summary = httpx.get(f"{url}/summary", timeout=60).json()
    said.looks += 1
    said.faults.update(fault["name"] for fault in health["degraded"] + health["failed"])
    said.held.update(f"{one['stage']}: {one['message']}" for one in summary["held"])


def _ordinary(folder: Path, number: int) -> Path:
    path = folder / f"ordinary-{number}.pdf"
    path.write_bytes(nested("text", 3, good=(1, 2, 3)) + b"\n%%%d" % number)
    return path


def _hostile(folder: Path, number: int) -> Path:
    kind, pages = KINDS[number % len(KINDS)], PAGES[number % len(PAGES)]
    path = folder / f"{kind}-{pages}-{number}.pdf"
    path.write_bytes(nested(kind, pages) + b"\n%%%d" % number)
    return path


def _line(outcome: Outcome) -> str:
    return (
        f"{outcome.hostile} hostile: {outcome.ordinary_processed} of {ORDINARY} ordinary documents "
        f"processed, longest wait {outcome.longest_wait:.1f} s, median {outcome.median_wait:.1f} s;"
        f" {outcome.hostile_ended} hostile ones ended {outcome.hostile_errors}; health in "
        f"{outcome.looks} looks: {outcome.faults or 'no fault'}; held: {outcome.held or 'nothing'}"
    )


def main() -> None:
    outcomes = []
    for hostile in (0, HOSTILE):
        outcomes.append(apart(measure, hostile))
        print(_line(outcomes[-1]), flush=True)
    result = {
        "machine": f"{platform.machine()}, {CORES} cores used of {os.cpu_count()}",
        # Other work on the machine lengthens both waits.
        "load_average": round(os.getloadavg()[1], 1),
        "runs": [asdict(outcome) for outcome in outcomes],
    }
    (RESULTS / "hostile_pages.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
