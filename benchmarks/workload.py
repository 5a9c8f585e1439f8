"""The real workers over whole workloads, in front of a simulated server at an H200's rates.

    python -m benchmarks.workload [--cases cold many one warm]

`cold`: one document of 155 pages, nothing known of the server. `many`: 18 documents of 1,148
pages, the long one first, an interactive one in mid-run: nothing lost, nothing asked for twice,
memory flat. `one` and `warm`: 155 pages and 1,500 by workers that begin with what `many` found
right; `warm` should take at most 1.03 times the server's own time, that of one always given enough.

Each case has a service and a server of its own, the server another process on loopback with its
time unscaled; but at `many` the queue is released when all documents wait in it. The pages
are scans of few pixels, no two alike, sent whole at the shipped resolution: they cost less CPU
than real ones, so that two cores feed six a second beside server and database. Prints tables; a
run of all cases without a fault writes results/workload.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from benchmarks.peers.simulated import Simulated, Times, own_answers, simulated
from benchmarks.peers.trees import cpu_seconds, memory_mib
from benchmarks.real_server import draw_all
from benchmarks.stack import OCR, RESULTS, SERVICE, Stack, apart, running_stack
from rag_service.jobs import fork_loads
from rag_service.knowledgebase.views import DocumentView, PageStatus, PageView
from rag_service.states import LayoutMode, RunState, Stage
from tests.simulators.simulated_batch import SERVERS

SERVER = "h200"
DRAWN_DPI = 50
SAID = "What the page says."
LOOK_SECONDS = 2.0
BEHIND_AT = (1, 5, 9, 10)
# Every case ends far earlier; beyond this pages are lost.
CASE_SECONDS, END_SECONDS = 900.0, 60.0
MOST_OVER_OWN = 1.03
# Memory counts as flat if the last quarter of a run has at most this factor of the first.
FLAT = 1.10


@dataclass(frozen=True)
class Case:
    """Documents by their pages. `held`: released at once when all wait; `interactive`: pages of one
    more document, handed in when half of the others' pages are read.
    """

    name: str
    sizes: Sequence[int]
    held: bool = True
    interactive: int | None = None

    @property
    def all_sizes(self) -> list[int]:
        return [*self.sizes, *([self.interactive] if self.interactive else [])]

    @property
    def pages(self) -> int:
        return sum(self.all_sizes)


COLD = Case("cold", [155])
MANY = Case("many", [1000, *range(1, 15), 19, 20], held=False, interactive=4)
ONE = Case("one", [155])
# 60 documents of 1 to 50 pages, 1,500 in all.
WARM = Case("warm", [7 * number % 50 + 1 for number in range(60)])
CASES = {case.name: case for case in (COLD, MANY, ONE, WARM)}


@dataclass(frozen=True)
class Look:
    """One moment: seconds since the first, pages answered so far, memory as PSS."""

    at: float
    pages: int
    ocr_mib: float
    service_mib: float


@dataclass(frozen=True)
class Ended:
    """A document: when it was handed in and when it ended, seconds after the case's first."""

    pages: int
    priority: str
    came: float
    ended: float


@dataclass(frozen=True)
class Memory:
    """Means of a run's second and last quarter in MiB, and the slope over all of it.

    In the first, from cold, the search still raises what is in flight.
    """

    second: float
    last: float
    mib_per_100_pages: float

    @property
    def is_flat(self) -> bool:
        return self.last <= FLAT * self.second


@dataclass(frozen=True)
class Speed:
    """Seconds of a case and of the server alone.

    `server`: from the first request to the last answer; `service`: from letting the queue go to
    the end of the last document; `own`: of a server that has all pages from the start. `behind`:
    how far behind that one the answers were after a tenth, half, nine tenths and all of them.
    """

    own: float
    server: float
    service: float
    behind: list[float]
    in_flight: float

    @property
    def server_over_own(self) -> float:
        return self.server / self.own

    @property
    def service_over_own(self) -> float:
        return self.service / self.own


@dataclass(frozen=True)
class Outcome:
    """A case's figures; `faults` is empty where nothing was lost, failed or done twice.

    `known`, `found`: requests in flight that were right for the server, before and after.
    """

    case: str
    documents: int
    pages: int
    known: float | None
    found: float | None
    speed: Speed
    cpu_ms_per_page: dict[str, float]
    memory: dict[str, Memory]
    looks: list[Look]
    ended: list[Ended]
    faults: list[str]


@contextmanager
def service(server: Simulated, known: float | None) -> Iterator[Stack]:
    """All workers as shipped and ready; `known`: what was right for the server before."""
    environment = {
        "GLMOCR_BASE_URL": server.url,
        "GLMOCR_PIPELINE_MAX_WORKERS": "auto",
        "RAG_SERVICE_OCR_LAYOUT": LayoutMode.PAGE.value,
    }
    with running_stack(durable=True, ocr=environment) as stack:
        if known is not None:
            fork_loads.store_good_in_flight(server.url, known)
        stack.start(stack.plan.workers())
        yield stack


class Feeding:
    """One case at work: its documents, and a look at memory every two seconds."""

    def __init__(self, case: Case, stack: Stack, server: Simulated, scans: Sequence[Path]) -> None:
        self._case = case
        self._stack = stack
        self._server = server
        self._scans = scans
        self.ids: list[str] = []
        self.looks: list[Look] = []

    def run(self) -> float:
        """Hand in and read everything; return when the queue was released. Raises TimeoutError."""
        began = time.time()
        with self._stack.held_back(OCR) if self._case.held else nullcontext():
            self._hand_in(self._scans[: len(self._case.sizes)], "bulk")
            if self._case.held:
                self._await_ready()
                began = time.time()
        self._watch()
        return began

    def _hand_in(self, scans: Sequence[Path], priority: str) -> None:
        options = self._stack.options(ocr="force", priority=priority)
        self.ids += [self._stack.take_in(scan, options) for scan in scans]

    def _await_ready(self) -> None:
        deadline = time.monotonic() + CASE_SECONDS
        for each in self.ids:
            while self._stack.view(each).status is not Stage.OCR.waiting:
                if time.monotonic() > deadline:
                    raise TimeoutError("Not all documents were prepared.")
                time.sleep(0.1)

    def _watch(self) -> None:
        """Until as many answers have gone out as there are pages."""
        began, answered = time.monotonic(), 0
        while answered < self._case.pages:
            if time.monotonic() > began + CASE_SECONDS:
                raise TimeoutError(f"{answered} of {self._case.pages} pages were answered.")
            mib = memory_mib(self._stack.trees())
            at = time.monotonic() - began
            self.looks.append(Look(at, answered, mib[OCR], mib[SERVICE]))
            time.sleep(LOOK_SECONDS)
            answered = len(self._server.times().answered)
            if answered >= sum(self._case.sizes) / 2 and len(self.ids) < len(self._scans):
                self._hand_in(self._scans[len(self.ids) :], "interactive")


def measure(case: Case, folder: Path, known: float | None) -> Outcome:
    """One case, from its service's start to its end."""
    scans = draw_all(folder, case.all_sizes, DRAWN_DPI)
    with simulated(SERVER) as server, service(server, known) as stack:
        feeding = Feeding(case, stack, server, scans)
        before = used(stack)
        let_go = feeding.run()
        views = stack.wait(feeding.ids, END_SECONDS)
        after, times = used(stack), server.times()
        return Outcome(
            case=case.name,
            documents=len(views),
            pages=case.pages,
            known=known,
            found=fork_loads.good_in_flight(server.url),
            speed=speed(times, max(map(end_of, views)) - let_go),
            cpu_ms_per_page={n: (after[n] - before[n]) / case.pages * 1000 for n in before},
            memory=quarters(feeding.looks),
            looks=feeding.looks,
            ended=endings(case, views),
            faults=[
                *document_faults(case, stack, views),
                *restarts(stack),
                *request_faults(case, times),
            ],
        )


def used(stack: Stack) -> dict[str, float]:
    """CPU seconds so far."""
    return {name: cpu_seconds(pids) for name, pids in stack.trees().items()}


def speed(times: Times, service_seconds: float) -> Speed:
    own, answered = own_answers(SERVERS[SERVER], len(times.answered)), sorted(times.answered)
    marks = [len(own) * tenths // 10 - 1 for tenths in BEHIND_AT]
    behind = [answered[mark] - min(times.came) - own[mark] for mark in marks]
    return Speed(own[-1], times.seconds, service_seconds, behind, times.in_flight)


def document_faults(case: Case, stack: Stack, views: Sequence[DocumentView]) -> Iterator[str]:
    """What was lost or failed."""
    for view, pages in zip(views, case.all_sizes, strict=True):
        if view.status is not RunState.PROCESSED or view.incomplete:
            yield f"{view.filename} is {view.status}: {view.error}"
        stored = stack.pages(view.id)
        if [page.number for page in stored] != list(range(1, pages + 1)):
            yield f"{view.filename} has {len(stored)} of {pages} pages."
        bad = [page.number for page in stored if not is_read(page)]
        if bad:
            yield f"{view.filename} lacks the text of pages {bad}."


def is_read(page: PageView) -> bool:
    return page.status is PageStatus.OCR and SAID in page.markdown


def restarts(stack: Stack) -> Iterator[str]:
    for program in stack.programs():
        if program.restarts:
            yield f"{program.name} was started again {program.restarts} times: {program.last_exit}"


def request_faults(case: Case, times: Times) -> Iterator[str]:
    """Requests that were lost or made twice."""
    if not len(times.came) == len(times.answered) == case.pages or times.left:
        yield (
            f"The server got {len(times.came)} requests for {case.pages} pages, answered "
            f"{len(times.answered)} and was left by {times.left}."
        )


def quarters(looks: Sequence[Look]) -> dict[str, Memory]:
    """Of the looks from the first answer on."""
    counted = [look for look in looks if look.pages]
    pages = [look.pages for look in counted]
    return {
        OCR: memory(pages, [look.ocr_mib for look in counted]),
        SERVICE: memory(pages, [look.service_mib for look in counted]),
    }


def memory(pages: Sequence[int], mib: Sequence[float]) -> Memory:
    quarter = len(mib) // 4
    slope = statistics.linear_regression(pages, mib).slope
    second = mib[quarter : 2 * quarter]
    return Memory(statistics.fmean(second), statistics.fmean(mib[-quarter:]), 100 * slope)


def end_of(view: DocumentView) -> float:
    if view.finished_at is None:
        raise ValueError(f"{view.filename} has not ended.")
    return view.finished_at.timestamp()


def endings(case: Case, views: Sequence[DocumentView]) -> list[Ended]:
    """Each document in the order of handing in."""
    first: datetime = min(view.created_at for view in views)
    return [
        Ended(
            pages=pages,
            priority="bulk" if number < len(case.sizes) else "interactive",
            came=(view.created_at - first).total_seconds(),
            ended=end_of(view) - first.timestamp(),
        )
        for number, (view, pages) in enumerate(zip(views, case.all_sizes, strict=True))
    ]


def show(outcome: Outcome) -> None:
    """One case's figures."""
    speed = outcome.speed
    print(f"\n{outcome.case}: {outcome.documents} documents, {outcome.pages} pages")
    print(f"  {'seconds':24} {'of its own':>18}")
    print(f"  {'the server by itself':24} {speed.own:7.1f}")
    print(f"  {'first request to answer':24} {speed.server:7.1f} {speed.server_over_own:10.3f}")
    print(f"  {'let go to last end':24} {speed.service:7.1f} {speed.service_over_own:10.3f}")
    late = ", ".join(f"{seconds:.1f}" for seconds in speed.behind)
    print(f"  behind the server by itself at {BEHIND_AT} tenths: {late} s")
    print(f"  in flight: {speed.in_flight:.1f} in the mean; right for the server: "
          f"{outcome.known} at first, {outcome.found} at last")  # fmt: skip
    for name, mib in outcome.memory.items():
        print(f"  {name:13} {outcome.cpu_ms_per_page[name]:4.0f} ms CPU a page; PSS "
              f"{mib.second:.0f} MiB in the second quarter, {mib.last:.0f} in the last, "
              f"{mib.mib_per_100_pages:+.2f} per 100 pages")  # fmt: skip
    print("  faults:", "; ".join(outcome.faults) or "none", flush=True)


def show_order(outcome: Outcome) -> None:
    """When each document ended."""
    print(f"\n  {'pages':>5}  {'priority':12} {'handed in':>9} {'ended':>7} {'took':>7}")
    for one in outcome.ended:
        print(f"  {one.pages:5}  {one.priority:12} {one.came:8.1f}s {one.ended:6.1f}s "
              f"{one.ended - one.came:6.1f}s", flush=True)  # fmt: skip


def verdicts(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, bool]]:
    """What is claimed, with its figure, and whether it is so."""
    for outcome in outcomes:
        yield f"{outcome.case}: {len(outcome.faults)} faults", not outcome.faults
        if outcome.case == MANY.name:
            for name, memory in outcome.memory.items():
                yield f"{name}: {memory.last / memory.second:.2f} of its memory", memory.is_flat
        if outcome.case == WARM.name:
            what = f"warm: {outcome.speed.server_over_own:.3f} of the server's own time"
            yield f"{what}, wanted {MOST_OVER_OWN}", outcome.speed.server_over_own <= MOST_OVER_OWN


def keep(outcomes: Sequence[Outcome], load: float) -> None:
    summary = {
        "server": SERVER, "cores": os.cpu_count(), "load_before": load,
        "cases": [asdict(outcome) for outcome in outcomes],
    }  # fmt: skip
    RESULTS.mkdir(parents=True, exist_ok=True)
    rounded = json.loads(json.dumps(summary), parse_float=lambda text: round(float(text), 3))
    (RESULTS / "workload.json").write_text(json.dumps(rounded, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--scans", type=Path, help="where the scans are kept, else thrown away")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f} before; a server at the rates of {SERVER}")
    with tempfile.TemporaryDirectory() as folder:
        outcomes = measure_all(given.cases, given.scans or Path(folder))
    print()
    found = list(verdicts(outcomes))
    for what, met in found:
        print(f"{what}: {'met' if met else 'missed'}")
    if any(outcome.faults for outcome in outcomes):
        sys.exit("Not kept: there are faults.")
    if {outcome.case for outcome in outcomes} == set(CASES):
        keep(outcomes, load)


def measure_all(names: Sequence[str], folder: Path) -> list[Outcome]:
    """One after the other, printed as they end; those after `many` begin with what it found."""
    outcomes: list[Outcome] = []
    known: float | None = None
    for name in names:
        outcomes.append(apart(measure, CASES[name], folder, known))
        show(outcomes[-1])
        if name == MANY.name:
            show_order(outcomes[-1])
            known = outcomes[-1].found
    return outcomes


if __name__ == "__main__":
    main()
