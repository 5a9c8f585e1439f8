"""Native pages a second, from the wake-up message to the record, beside two plain extractors.

    python -m benchmarks.native [CORPUS_FOLDER]

The service runs whole, as `up` starts it: broker, prepare worker with its default concurrency,
PostgreSQL with flushed writes; the documents wait in the queue before the clock starts. Beside it,
on the same files and one process each: PyMuPDF's get_text() and poppler's pdftotext. The files are
the native pages of the corpus' born-digital documents: those without a table once as one long
document, which shows what a page costs, and once as the documents they come from, which adds what
a document costs; those with a table apart. Each copy has bytes of its own. Prints a table and
writes benchmarks/results/native.json.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.corpus import CorpusFile, read_manifest, run_on_corpus
from benchmarks.stack import RESULTS, Stack, apart, running_stack
from rag_service.knowledgebase.views import PageView
from rag_service.states import RunState, Stage

ROUNDS = 3
# The fastest of the three works at least this long in every round.
ROUND_SECONDS = 5.0
PATIENCE = 300.0
KINDS = ("born_digital", "text_trap")
FEWEST_PAGES = 2
TARGET = 0.5
# The first kinds, those without tables, are held to it.
WITH_TARGET = 2
TABLE_RULE = "| ---"


@dataclass(frozen=True)
class SamplePages:
    """Documents that hold one kind of page."""

    name: str
    files: list[Path]
    pages: int


def sources(corpus: Path) -> list[CorpusFile]:
    """Born-digital documents of several pages that open without a password."""
    native = [
        file
        for file in read_manifest(corpus)
        if file.kind in KINDS and file.right.startswith("DONE from the ORIGINAL")
    ]
    return [file for file in native if _page_count(file.path) >= FEWEST_PAGES]


def _page_count(path: Path) -> int:
    import pymupdf

    with pymupdf.open(path) as document:
        return int(document.page_count)


def sort_pages(stack: Stack, files: Iterable[CorpusFile], folder: Path) -> list[SamplePages]:
    """Have the service read the files once, which also warms it, and part their native pages."""
    # Without OCR every page ends here; the ones that would need it are left out.
    options = stack.options(ocr="off")
    paths = [file.path for file in files]
    views = stack.wait([stack.take_in(path, options) for path in paths], PATIENCE)
    plain, tables = SamplePages("without tables", [], 0), SamplePages("with tables", [], 0)
    for path, view in zip(paths, views, strict=True):
        native = [page for page in stack.pages(view.id) if is_native(page)]
        plain = _with(plain, path, [p for p in native if not has_table(p)], folder)
        tables = _with(tables, path, [p for p in native if has_table(p)], folder)
    return [_joined(plain, folder), plain, tables]


def _joined(samples: SamplePages, folder: Path) -> SamplePages:
    """The same pages as one document."""
    import pymupdf

    target = folder / "joined.pdf"
    with pymupdf.open() as whole:
        for path in samples.files:
            with pymupdf.open(path) as document:
                whole.insert_pdf(document)
        whole.save(target, garbage=3, deflate=True)
    return SamplePages(f"{samples.name}, joined", [target], samples.pages)


def is_native(page: PageView) -> bool:
    return page.status == "native" and not page.warnings


def has_table(page: PageView) -> bool:
    return TABLE_RULE in page.markdown


def _with(samples: SamplePages, path: Path, pages: Sequence[PageView], folder: Path) -> SamplePages:
    """Return the sample pages, with one more document of these pages if there are any."""
    import pymupdf

    if not pages:
        return samples
    target = folder / f"{samples.name.replace(' ', '-')}-{path.stem}.pdf"
    with pymupdf.open(path) as document:
        document.select([page.number - 1 for page in pages])
        document.save(target, garbage=3, deflate=True)
    return SamplePages(samples.name, [*samples.files, target], samples.pages + len(pages))


def copies(samples: SamplePages, count: int, tag: str, folder: Path) -> SamplePages:
    """Every document `count` times. A comment after the end makes each copy's bytes its own."""
    files = []
    for number in range(count):
        for source in samples.files:
            target = folder / f"{source.stem}-{tag}-{number}.pdf"
            shutil.copyfile(source, target)
            with target.open("ab") as file:
                file.write(f"\n% copy {tag} {number}\n".encode())
            files.append(target)
    return SamplePages(samples.name, files, samples.pages * count)


def pymupdf_seconds(files: Sequence[Path]) -> float:
    """Run in a process of its own, without the service's modules."""
    return apart(_read_all, files)


def _read_all(files: Sequence[Path]) -> float:
    import pymupdf

    started = time.perf_counter()
    for path in files:
        with pymupdf.open(path) as document:
            for page in document:
                page.get_text()
    return time.perf_counter() - started


def pdftotext_seconds(files: Sequence[Path]) -> float | None:
    """None where poppler is not installed."""
    if shutil.which("pdftotext") is None:
        return None
    started = time.perf_counter()
    for path in files:
        subprocess.run(["pdftotext", str(path), "-"], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def service_seconds(stack: Stack, samples: SamplePages, priority: str) -> float:
    """From the moment the workers may begin to the last record; intake has its own benchmark."""
    options = stack.options(priority=priority)
    with stack.held_back(Stage.PREPARE):
        ids = [stack.take_in(path, options) for path in samples.files]
        started = datetime.now(UTC)
    views = stack.wait(ids, PATIENCE)
    read = sum(view.pages.native for view in views if view.status is RunState.PROCESSED)
    if read != samples.pages:
        raise AssertionError(f"{read} of {samples.pages} pages were read natively.")
    ended = max(view.finished_at for view in views if view.finished_at)
    return (ended - started).total_seconds()


@dataclass(frozen=True)
class Rate:
    """Pages a second of one reader over the rounds."""

    reader: str
    rounds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


READERS = ("PyMuPDF get_text", "pdftotext", "service, bulk", "service, interactive")


def measure(stack: Stack, samples: SamplePages, folder: Path) -> dict[str, Any]:
    """Every reader on the same files, round by round, so that a slow moment hits all of them."""
    count = math.ceil(ROUND_SECONDS / pymupdf_seconds(samples.files))
    found: dict[str, list[float]] = {reader: [] for reader in READERS}
    pages = samples.pages * count
    for number in range(ROUNDS):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            once = copies(samples, count, f"{number}a", Path(name))
            again = copies(samples, count, f"{number}b", Path(name))
            seconds = (
                pymupdf_seconds(once.files),
                pdftotext_seconds(once.files),
                service_seconds(stack, once, "bulk"),
                service_seconds(stack, again, "interactive"),
            )
        for reader, took in zip(READERS, seconds, strict=True):
            if took is not None:
                found[reader].append(pages / took)
    rates = [Rate(reader, rounds) for reader, rounds in found.items() if rounds]
    return report(samples, pages, count, rates)


def report(samples: SamplePages, pages: int, count: int, rates: Sequence[Rate]) -> dict[str, Any]:
    """Print one kind's rows and return them for the JSON."""
    base = rates[0].median
    print(f"\npages {samples.name}: {samples.pages} from {len(samples.files)} documents x {count}")
    print(f"{'':22} {'pages/s':>9} {'of PyMuPDF':>11}   rounds")
    for rate in rates:
        rounds = ", ".join(f"{one:.0f}" for one in rate.rounds)
        print(f"{rate.reader:22} {rate.median:9.1f} {rate.median / base:11.2f}   {rounds}")
    for reader in set(READERS) - {rate.reader for rate in rates}:
        print(f"{reader:22} absent: apt-get install poppler-utils")
    return {
        "pages": samples.name,
        "distinct_pages": samples.pages,
        "documents": len(samples.files),
        "copies": count,
        "pages_a_round": pages,
        "pages_per_second": {r.reader: {"median": r.median, "rounds": r.rounds} for r in rates},
        "of_pymupdf": {r.reader: r.median / base for r in rates},
    }


def compare(corpus: Path) -> None:
    with running_stack(durable=True) as stack:
        stack.start(stack.plan.prepare_only())
        folder = stack.folder / "files"
        folder.mkdir()
        settings = stack.settings
        load = os.getloadavg()[0]
        print(f"{os.cpu_count()} cores, load {load:.1f} before; prepare forks: "
              f"{settings.prepare.worker_concurrency}; medians of {ROUNDS}")  # fmt: skip
        kinds = sort_pages(stack, sources(corpus), folder)
        results = [measure(stack, samples, folder) for samples in kinds]
    print()
    for result in results[:WITH_TARGET]:
        share = result["of_pymupdf"][READERS[2]]
        verdict = "met" if share >= TARGET else "missed"
        print(f"{result['pages']}, bulk: {share:.2f} of plain PyMuPDF, wanted {TARGET}: {verdict}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    summary = {
        "cores": os.cpu_count(),
        "load_before": load,
        "rounds": ROUNDS,
        "target": TARGET,
        "kinds": results,
    }
    (RESULTS / "native.json").write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    run_on_corpus(__doc__ or "", compare)
