"""Compare CPU engines on scans: recall, order, CPU seconds, memory.

    python benchmarks/cpu_engines.py [CORPUS_FOLDER]

The corpus is the argument, else RAG_CORPUS, else ../shared/corpus beside the repository. Every
engine runs in a process of its own on the same pictures at 150 DPI; one that is not installed is
shown with the command that installs it. `via` is how its text is put in order: "serve" is the
server's own path (turning, reading order), `own` is the engine's. Prints a table and writes
benchmarks/results/cpu_engines.json.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "cpu_engines.json"
DPI = 150
DIRECTIONS = (90, 180, 270)
PICTURES = (".png", ".jpg", ".tiff")


@dataclass(frozen=True)
class SamplePage:
    """A page to read: its picture, the text it holds, whether it was turned by us."""

    name: str
    picture: str
    truth: str
    turned: int
    whole: bool


@dataclass(frozen=True)
class Score:
    """One page by one engine. recall: share of the true words found, in any order."""

    name: str
    turned: int
    recall: float
    in_order: float | None
    cpu_seconds: float


def truths(corpus: Path) -> Iterator[tuple[Path, list[str], bool]]:
    """Files with their text by page: a .gt.txt beside them, else the manifest's expected words."""
    with (corpus / "manifest.tsv").open(newline="") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t"))
    for row in rows:
        path = corpus / row["file"]
        expected = row["expect_contains"].partition("(see ")[0].strip()
        reference = path.with_suffix(".gt.txt")
        if row["kind"] not in ("scan_gt", "image") or not path.exists():
            continue
        if reference.exists():
            yield path, reference.read_text().split("\f"), True
        elif expected and not expected.startswith("see "):
            yield path, [expected], False


def samples(corpus: Path, folder: Path) -> list[SamplePage]:
    """Every page rendered at 150 DPI, and those with a whole text turned three ways as well."""
    made = []
    for path, pages, whole in truths(corpus):
        for number, truth in enumerate(pages):
            if not truth.strip():
                continue
            image = render(path, number)
            for turned in (0, *(DIRECTIONS if whole else ())):
                target = folder / f"{path.stem}-{number}-{turned}.png"
                image.rotate(turned, expand=True).save(target)
                made.append(
                    SamplePage(f"{path.name}:{number + 1}", str(target), truth, turned, whole)
                )
    return made


def render(path: Path, number: int) -> Image.Image:
    """One page as a Pillow picture; a picture file as it is."""
    import pymupdf
    from PIL import Image

    if path.suffix in PICTURES:
        return Image.open(path).convert("RGB")
    with pymupdf.open(path) as document:
        pixels = document[number].get_pixmap(dpi=DPI, alpha=False)
        return Image.frombytes("RGB", (pixels.width, pixels.height), pixels.samples)


def read_by_service(size: str) -> Callable[[Path], str]:
    """The server's own path from a picture to its text."""
    sys.path.insert(0, str(ROOT))
    from workers.servers.cpu_ocr import page_orientation, text_order
    from workers.servers.cpu_ocr.ocr_engine import FasterPaddle

    engine = FasterPaddle("small" if size == "small" else "tiny", 0)
    return lambda path: text_order.to_text(
        page_orientation.read_page(engine, path.read_bytes()).boxes
    )


def own(size: str) -> Callable[[Path], str]:
    """faster-paddle with the text order it makes itself."""
    from faster_paddle import OcrEngine

    engine = OcrEngine(model_size=size)
    return lambda path: str(engine.ocr(path.read_bytes())["text"])


def rapidocr(_: str) -> Callable[[Path], str]:
    from rapidocr import RapidOCR

    engine = RapidOCR()
    return lambda path: "\n".join(engine(str(path)).txts or ())


def tesseract(_: str) -> Callable[[Path], str]:
    subprocess.run(["tesseract", "--version"], check=True, capture_output=True)

    def read(path: Path) -> str:
        command = ["tesseract", str(path), "stdout", "--dpi", str(DPI)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    return read


@dataclass(frozen=True)
class Candidate:
    name: str
    via: str
    make: Callable[[str], Callable[[Path], str]]
    size: str
    install: str


CANDIDATES = (
    Candidate("faster-paddle tiny", "serve", read_by_service, "tiny", "pip install faster-paddle"),
    Candidate(
        "faster-paddle small", "serve", read_by_service, "small", "pip install faster-paddle"
    ),
    Candidate("faster-paddle tiny", "own", own, "tiny", "pip install faster-paddle"),
    Candidate("rapidocr small", "own", rapidocr, "", "pip install rapidocr onnxruntime"),
    Candidate("tesseract eng", "own", tesseract, "", "apt-get install tesseract-ocr"),
)


def words(text: str) -> list[str]:
    """Words as letters and digits; one divided over a line end counts as one."""
    return re.findall(r"\w+", re.sub(r"(?<=[^\W\d_])-\n(?=[a-z])", "", text).lower())


def score(sample: SamplePage, text: str, cpu: float) -> Score:
    wanted, found = words(sample.truth), words(text)
    recall = sum((Counter(wanted) & Counter(found)).values()) / len(wanted)
    matcher = SequenceMatcher(None, wanted, found, autojunk=False)
    kept = sum(block.size for block in matcher.get_matching_blocks()) / len(wanted)
    return Score(sample.name, sample.turned, recall, kept if sample.whole else None, cpu)


def cpu_seconds() -> float:
    used = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used)


def measure(candidate: Candidate, pages: list[SamplePage]) -> dict[str, Any]:
    """In the engine's own process: read every page and add up what it cost."""
    try:
        started = time.monotonic()
        read = candidate.make(candidate.size)
        read(Path(pages[0].picture))
    except (ImportError, FileNotFoundError):
        return {"absent": candidate.install}
    ready = time.monotonic() - started
    scores = []
    for page in pages:
        before = cpu_seconds()
        text = read(Path(page.picture))
        scores.append(score(page, text, cpu_seconds() - before))
    return {"ready_seconds": ready, **summary(scores), "pages": [asdict(s) for s in scores]}


def summary(scores: list[Score]) -> dict[str, Any]:
    upright = [s for s in scores if not s.turned]
    ordered = [s.in_order for s in upright if s.in_order is not None]
    peaks = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "recall": statistics.median(s.recall for s in upright),
        "recall_mean": statistics.mean(s.recall for s in upright),
        "in_order": statistics.median(ordered),
        "recall_turned": statistics.median(s.recall for s in scores if s.turned),
        "cpu_seconds": statistics.median(s.cpu_seconds for s in upright),
        "peak_mib": max(peak.ru_maxrss for peak in peaks) / 1024,
    }


def in_own_process(index: int, listing: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--engine", str(index), "--samples", str(listing)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


COLUMNS = ("recall", "recall_mean", "in_order", "recall_turned", "cpu_seconds", "peak_mib")


def show(candidate: Candidate, result: dict[str, Any]) -> None:
    head = f"{candidate.name:20} {candidate.via:7}"
    if "absent" in result:
        print(f"{head} absent: {result['absent']}")
        return
    print(head, *(f"{result[c]:>13.{0 if c == 'peak_mib' else 3}f}" for c in COLUMNS), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = os.environ.get("RAG_CORPUS") or ROOT.parent / "shared" / "corpus"
    parser.add_argument("corpus", nargs="?", type=Path, default=Path(default))
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--samples", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        pages = [SamplePage(**sample) for sample in json.loads(options.samples.read_text())]
        print(json.dumps(measure(CANDIDATES[options.engine], pages)))
        return
    if not (options.corpus / "manifest.tsv").exists():
        sys.exit(f"No manifest.tsv in {options.corpus}: name the corpus folder or set RAG_CORPUS.")
    compare(options.corpus)


def compare(corpus: Path) -> None:
    results = []
    with tempfile.TemporaryDirectory() as folder:
        pages = samples(corpus, Path(folder))
        listing = Path(folder) / "samples.json"
        listing.write_text(json.dumps([asdict(page) for page in pages]))
        upright = sum(not page.turned for page in pages)
        print(f"{upright} pages upright, {len(pages) - upright} turned, {DPI} DPI, "
              f"{os.cpu_count()} cores; medians")  # fmt: skip
        print(f"{'engine':20} {'via':7}", *(f"{column:>13}" for column in COLUMNS))
        for index, candidate in enumerate(CANDIDATES):
            result = in_own_process(index, listing)
            show(candidate, result)
            results.append({"engine": candidate.name, "via": candidate.via, **result})
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    report = {"dpi": DPI, "cores": os.cpu_count(), "engines": results}
    RESULT.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
