"""The real workers in front of a real OCR server: `auto` against fixed settings.

    python -m benchmarks.real_server http://127.0.0.1:5002 --name h200 --settings auto 4 8

Each setting gets a process with PostgreSQL, Valkey and workers of its own, and scans of which
no two pages are alike and documents differ in length, after a warm-up from cold. Prints answers a
second by the server's tokens, pages a second as they are stored, what was in flight, the server's
gauges and the verdict; writes results/real_server_NAME.json and a plot of each setting. A fixed
setting is pages in flight a document, so all in all it is times the forks.

With a model of random weights each answer is cut at `--max-tokens`, so every page is asked for
twice, and requests that went out together come back together. There answers a second are what to
compare: of the tokens, with the middle of the time counting most, so that it does not matter
whether the first and the last second cut a lump.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx

from benchmarks import plot
from benchmarks.peers.trees import memory_mib
from benchmarks.stack import OCR, RESULTS, Stack, apart, running_stack
from rag_service.database.totals import read_totals as read_counts
from rag_service.jobs import fork_loads, server_samples
from rag_service.ocr.server_gauges import ServerGauges, read_gauges
from rag_service.states import PageState

LOOK_SECONDS = 1.0
LEAST_LOOKS = 10
PREPARE_SECONDS = 300.0
WORDS = [
    "harbour",
    "timber",
    "report",
    "evening",
    "oranges",
    "merchant",
    "ledger",
    "seven",
    "north",
    "copper",
    "winter",
]


@dataclass(frozen=True)
class Look:
    """One moment of a run."""

    at: float
    done: int
    tokens: float | None
    in_flight: float
    running: float | None
    waiting: float | None
    worker_mib: float


@dataclass
class Outcome:
    """A setting and its result after the warm-up."""

    setting: str
    answers_per_second: float | None
    pages_per_second: float
    in_flight: float
    running: float | None
    waiting: float | None
    worker_mib: float
    failed: int
    verdict: str
    warm_up: float
    looks: list[Look] = field(default_factory=list)


def draw(target: Path, pages: int, dpi: int, seed: int) -> Path:
    """A PDF of scanned pages full of words, no two alike."""
    from rag_service.pdf.child.mupdf import pymupdf

    chance = random.Random(seed)
    with pymupdf.open() as scan:
        for _ in range(pages):
            with pymupdf.open() as drawn:
                page = drawn.new_page(width=595, height=842)
                lines = (" ".join(chance.choices(WORDS, k=11)) for _ in range(52))
                page.insert_textbox((40, 40, 555, 800), "\n".join(lines), fontsize=10)
                pixels = page.get_pixmap(dpi=dpi, colorspace=pymupdf.csGRAY)
            page_image = scan.new_page(width=595, height=842)
            page_image.insert_image(page_image.rect, stream=pixels.tobytes("jpeg", jpg_quality=80))
        scan.save(target)
    return target


def draw_all(folder: Path, sizes: Sequence[int], dpi: int) -> list[Path]:
    """Draw a scan for each number of pages; files that exist already stay."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{dpi}-{pages}-{number}.pdf" for number, pages in enumerate(sizes)]
    with ProcessPoolExecutor() as pool:
        jobs = [
            pool.submit(draw, path, pages, dpi, number)
            for number, (path, pages) in enumerate(zip(paths, sizes, strict=True))
            if not path.is_file()
        ]
        for job in jobs:
            job.result()
    return paths


@contextmanager
def working(
    url: str, setting: str, scans: Sequence[Path], options: argparse.Namespace
) -> Iterator[Stack]:
    """All scans planned, and the ocr worker just started."""
    ocr = {
        "GLMOCR_BASE_URL": url,
        "GLMOCR_PIPELINE_MAX_WORKERS": setting,
        "OCR_WORKER_CONCURRENCY": str(options.forks),
        "OCR_MAX_TOKENS": str(options.max_tokens),
        "RAG_SERVICE_OCR_DPI": str(options.dpi),
        "RAG_SERVICE_OCR_LAYOUT": options.layout,
        "RAG_SERVICE_OCCUPANCY_SAMPLE_EVERY": "5",
    }
    if options.slots:
        ocr["RAG_SERVICE_OCCUPANCY_SLOTS"] = str(options.slots)
    with running_stack(durable=False, ocr=ocr) as stack:
        maintenance, reader, preparer = stack.plan.workers()
        stack.start([maintenance, preparer])
        chosen = stack.options(ocr="force", priority=options.priority)
        for path in scans:
            stack.take_in(path, chosen)
        _await_planned(sum(sizes(options.documents, options.pages)))
        stack.start([reader])
        yield stack


def _await_planned(pages: int) -> None:
    deadline = time.monotonic() + PREPARE_SECONDS
    while _pages(PageState.PENDING) < pages:
        if time.monotonic() > deadline:
            raise TimeoutError(f"Only {_pages(PageState.PENDING)} of {pages} pages were planned.")
        time.sleep(0.5)


def _pages(*states: PageState) -> int:
    counts: Mapping[str, int] = read_counts().active_pages
    return sum(counts.get(state, 0) for state in states)


def watch(stack: Stack, url: str, total: int, seconds: float) -> list[Look]:
    """Look about once a second until the time is over or no page is left."""
    began = time.monotonic()
    looks: list[Look] = []
    with httpx.Client(base_url=url) as http:
        while (now := time.monotonic() - began) < seconds:
            left = _pages(PageState.PENDING)
            gauges = _gauges(http)
            looks.append(
                Look(
                    round(now, 2), total - left, gauges.tokens if gauges else None,
                    fork_loads.in_flight(url), gauges.running if gauges else None,
                    gauges.waiting if gauges else None,
                    round(memory_mib(stack.trees())[OCR], 1),
                )
            )  # fmt: skip
            if left == 0:
                break
            time.sleep(LOOK_SECONDS)
    return looks


def _gauges(http: httpx.Client) -> ServerGauges | None:
    async def ask() -> ServerGauges | None:
        async with httpx.AsyncClient(base_url=http.base_url) as client:
            return await read_gauges(client)

    return asyncio.run(ask())


def sizes(documents: int, pages: int) -> list[int]:
    """Pages of each document, `pages` on average: those that began together do not end together."""
    return [pages + round(pages * (number % 9 - 4) / 8) for number in range(documents)]


def measure(url: str, setting: str, scans: Sequence[Path], options: argparse.Namespace) -> Outcome:
    """One setting from cold; the warm-up is looked at and not counted."""
    total = sum(sizes(options.documents, options.pages))
    with working(url, setting, scans, options) as stack:
        looks = watch(stack, url, total, options.warm_up + options.seconds)
        samples = server_samples.samples(url, options.seconds)
        failed = _pages(PageState.FAILED)
    counted = [look for look in looks if look.at >= options.warm_up and look.done < total]
    if len(counted) < LEAST_LOOKS:
        raise SystemExit(
            f"All pages were read {looks[-1].at:.0f} s after the start, within the warm-up or soon "
            "after it. Give more --documents or --pages, or a shorter --warm-up."
        )
    first, last = counted[0], counted[-1]
    running = [look.running for look in counted if look.running is not None]
    waiting = [look.waiting for look in counted if look.waiting is not None]
    return Outcome(
        setting=setting,
        answers_per_second=answers_per_second(counted, options.max_tokens),
        pages_per_second=round((last.done - first.done) / (last.at - first.at), 3),
        in_flight=round(statistics.fmean(look.in_flight for look in counted), 1),
        running=round(statistics.fmean(running), 1) if running else None,
        waiting=round(statistics.fmean(waiting), 1) if waiting else None,
        worker_mib=max(look.worker_mib for look in counted),
        failed=failed,
        verdict=statistics.mode(s.diagnosis.verdict.value for s in samples) if samples else "",
        warm_up=options.warm_up,
        looks=looks,
    )


def answers_per_second(looks: Sequence[Look], tokens: int) -> float | None:
    """By the server's tokens, where it counts them and all answers are as long as they may be.

    Weighted with a Hann window: lumps of any length that fits in a few times even out.
    """
    first, length = looks[0].at, looks[-1].at - looks[0].at
    total = weights = 0.0
    for before, after in pairwise(looks):
        if before.tokens is None or after.tokens is None:
            return None
        middle = ((before.at + after.at) / 2 - first) / length
        weight = math.sin(math.pi * middle) ** 2
        total += weight * (after.tokens - before.tokens)
        weights += weight * (after.at - before.at)
    return round(total / tokens / weights, 3)


def _print(outcome: Outcome) -> None:
    print(
        f"{outcome.setting:>6} {outcome.answers_per_second} answers/s "
        f"{outcome.pages_per_second:8.2f} pages/s  in flight "
        f"{outcome.in_flight:6.1f}  running {outcome.running}  waiting {outcome.waiting}  "
        f"worker {outcome.worker_mib:.0f} MiB  failed {outcome.failed}  {outcome.verdict}",
        flush=True,
    )


def keep(name: str, outcomes: Sequence[Outcome], folder: Path, about: Mapping[str, object]) -> None:
    """The figures as JSON and each setting as a plot; earlier settings of the name stay."""
    path = folder / f"real_server_{name}.json"
    kept = json.loads(path.read_text())["settings"] if path.is_file() else []
    measured = {outcome.setting for outcome in outcomes}
    kept = [one for one in kept if one["setting"] not in measured]
    found = {**about, "settings": [*kept, *map(asdict, outcomes)]}
    path.write_text(json.dumps(found, indent=1) + "\n")
    for outcome in outcomes:
        lines = {
            "in flight": [(look.at, float(look.in_flight)) for look in outcome.looks],
            "running": [(look.at, look.running or 0.0) for look in outcome.looks],
            "waiting": [(look.at, look.waiting or 0.0) for look in outcome.looks],
        }
        title = f"{name}, {outcome.setting}: {outcome.answers_per_second} answers/s"
        picture = plot.lines(title, "seconds", "requests", lines)
        (folder / f"real_server_{name}_{outcome.setting}.svg").write_text(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?")
    parser.add_argument("--name", default="server")
    parser.add_argument("--settings", nargs="+", default=["auto"])
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--warm-up", type=float, default=60.0)
    parser.add_argument("--forks", type=int, default=8)
    parser.add_argument("--documents", type=int, default=18)
    parser.add_argument("--pages", type=int, default=60)
    parser.add_argument("--dpi", type=int, default=150)
    parser.add_argument("--layout", default="page")
    parser.add_argument("--max-tokens", type=int, default=1000)
    parser.add_argument("--slots", type=int, help="that the server has, if it does not say so")
    # One fork is kept for interactive documents, which these are so that all forks take them.
    parser.add_argument("--priority", default="interactive")
    parser.add_argument("--scans", type=Path, default=Path("/tmp/rag-bench-scans"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.url is None:
        print("Give the URL of a real OCR server; this measures nothing without one.")
        return
    scans = draw_all(options.scans, sizes(options.documents, options.pages), options.dpi)
    about = {
        "server": options.name, "forks": options.forks, "dpi": options.dpi,
        "layout": options.layout, "answer_tokens": options.max_tokens,
        "slots": options.slots, "cores": os.cpu_count(), "seconds": options.seconds,
    }  # fmt: skip
    for setting in options.settings:
        outcome = apart(measure, options.url.rstrip("/"), setting, scans, options)
        _print(outcome)
        keep(options.name, [outcome], options.results, about)


if __name__ == "__main__":
    main()
