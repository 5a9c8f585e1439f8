"""Words found and pages a second on scans: the default stack beside OCRmyPDF, on the same files.

    python -m benchmarks.scans [CORPUS_FOLDER]

The files are the corpus' scans and pictures whose text is known. The service runs whole with
its default CPU engine, from the first document accepted to the last processed; OCRmyPDF reads
the same files in the same run, as many at once as there are cores, so that both keep the machine
busy. Recall: the share of the true words that were found on their page, in any order. Prints a
table and writes benchmarks/results/scans.json.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.corpus import run_on_corpus
from benchmarks.cpu_engines import truths, words
from benchmarks.stack import RESULTS, Stack, running_stack
from rag_service.states import RunState

PATIENCE = 900.0
PICTURE_DPI = "150"
# A picture may have a layer of transparency, which OCRmyPDF refuses.
OCRMYPDF = ("ocrmypdf", "--force-ocr", "--output-type", "pdf", "--jobs", "1", "--quiet",
            "--image-dpi", PICTURE_DPI)  # fmt: skip
TURNING = ("--rotate-pages", "--rotate-pages-threshold", "2", "--deskew")


@dataclass(frozen=True)
class Scan:
    """A file and the true text of each of its first pages; `whole`: of the whole page."""

    path: Path
    truth: list[str]
    whole: bool


@dataclass(frozen=True)
class Reading:
    """What a reader made of all scans: for each file its pages' text, or None where it failed."""

    reader: str
    seconds: float
    pages: int
    texts: list[list[str] | None]


def read_by_service(stack: Stack, scans: Sequence[Scan]) -> Reading:
    """Both forks of each worker take part; the seconds are the database's."""
    options = stack.options(priority="interactive")
    ids = [stack.take_in(scan.path, options) for scan in scans]
    views = stack.wait(ids, PATIENCE)
    ended = max(view.finished_at for view in views if view.finished_at)
    began = min(view.created_at for view in views)
    texts = [
        [page.markdown for page in stack.pages(view.id)]
        if view.status is RunState.PROCESSED
        else None
        for view in views
    ]
    read = sum(view.pages.done for view in views)
    return Reading("service", (ended - began).total_seconds(), read, texts)


def read_by_ocrmypdf(name: str, scans: Sequence[Scan], *options: str) -> Reading | None:
    """Return None if it is not installed."""
    if shutil.which(OCRMYPDF[0]) is None:
        return None
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        started = time.perf_counter()
        targets = [Path(folder) / f"{number}.txt" for number in range(len(scans))]
        texts = list(pool.map(lambda s, t: _sidecar(s.path, t, options), scans, targets))
        seconds = time.perf_counter() - started
    return Reading(name, seconds, sum(len(text or []) for text in texts), texts)


def _sidecar(path: Path, target: Path, options: Sequence[str]) -> list[str] | None:
    """The text of each page, or None where OCRmyPDF refuses the file."""
    command = [*OCRMYPDF, *options, "--sidecar", str(target), str(path), "-"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if done.returncode:
        return None
    return target.read_text().split("\f")


def recalls(scan: Scan, text: list[str] | None) -> list[float]:
    """The recall of each page whose text is known; a file that failed has found nothing."""
    found = text or []
    return [
        recall(truth, found[number] if number < len(found) else "")
        for number, truth in enumerate(scan.truth)
        if truth.strip()
    ]


def recall(truth: str, text: str) -> float:
    wanted = words(truth)
    return sum((Counter(wanted) & Counter(words(text))).values()) / len(wanted)


def summary(scans: Sequence[Scan], reading: Reading) -> dict[str, Any]:
    files = [recalls(scan, text) for scan, text in zip(scans, reading.texts, strict=True)]
    whole = [r for scan, pages in zip(scans, files, strict=True) if scan.whole for r in pages]
    return {
        "pages": reading.pages,
        "seconds": round(reading.seconds, 2),
        "pages_per_second": reading.pages / reading.seconds,
        "recall_mean": statistics.mean(r for pages in files for r in pages),
        "recall_whole_pages": statistics.mean(whole),
        "failed_files": sum(text is None for text in reading.texts),
        "files": [
            {"file": scan.path.name, "recall": [round(r, 3) for r in pages]}
            for scan, pages in zip(scans, files, strict=True)
        ],
    }


def show(results: dict[str, dict[str, Any]]) -> None:
    print(f"\n{'':24} {'pages':>6} {'seconds':>8} {'pages/s':>8} {'recall':>7} {'whole':>7} failed")
    for reader, result in results.items():
        print(
            f"{reader:24} {result['pages']:6} {result['seconds']:8.1f}"
            f" {result['pages_per_second']:8.2f} {result['recall_mean']:7.3f}"
            f" {result['recall_whole_pages']:7.3f} {result['failed_files']:6}"
        )
    print(f"\n{'recall by page':40} " + "  ".join(results))
    for lines in zip(*(result["files"] for result in results.values()), strict=True):
        cells = (" ".join(f"{r:.2f}" for r in line["recall"]) for line in lines)
        print(f"{lines[0]['file']:40} " + "  |  ".join(cells))


def compare(corpus: Path) -> None:
    scans = [Scan(path, truth, whole) for path, truth, whole in truths(corpus)]
    load = os.getloadavg()[0]
    print(f"{len(scans)} files, {os.cpu_count()} cores, load {load:.1f} before", flush=True)
    with running_stack(durable=True) as stack:
        stack.start([stack.plan.ocr_server(), *stack.plan.workers()])
        engine = stack.settings.cpu_ocr.engine
        readings: list[Reading | None] = [read_by_service(stack, scans)]
    readings += [
        read_by_ocrmypdf("OCRmyPDF", scans),
        read_by_ocrmypdf("OCRmyPDF, turning", scans, *TURNING),
    ]
    results = {r.reader: summary(scans, r) for r in readings if r is not None}
    show(results)
    if len(results) == 1:
        print("OCRmyPDF is absent: apt-get install ocrmypdf")
    RESULTS.mkdir(parents=True, exist_ok=True)
    report = {"cores": os.cpu_count(), "load_before": load, "engine": engine, "readers": results}
    (RESULTS / "scans.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    run_on_corpus(__doc__ or "", compare)
