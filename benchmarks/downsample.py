"""What shrinking saves and what it costs: sizes by shrinker, words still legible by resolution.

    python -m benchmarks.downsample

A synthetic scan of known text at 300 DPI (grain, blur and a little skew) goes through both
shrinkers at both tiers. Tesseract then reads every file, drawn at the file's own resolution. A
plain drawing at the same resolutions shows what the resolution alone costs; that is also all
there is at 72 DPI, to which neither shrinker of the service goes. Word match: the share of the true
words that were found on their page, in any order. Beside it the figures of the field report
that this service answers. Prints a table and writes benchmarks/results/downsample.json.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import pymupdf
from PIL import Image, ImageChops, ImageFilter

from benchmarks.cpu_engines import words
from benchmarks.stack import RESULTS
from rag_service.config.loader import load_settings
from rag_service.errors import RagServiceError
from rag_service.pdf import ghostscript
from rag_service.pdf.session import PdfSession
from samples.texts import AGREEMENT, SCAN, Paragraph

SCAN_DPI = 300
TIERS = (300, 150, 100, 72)
SHRUNK_TIERS = (150, 100)
REPORTED = {150: 97, 100: 93, 72: 45}
PAGES, SENTENCES = 4, 40
A4 = pymupdf.paper_rect("a4")
MARGIN, FONT_SIZE, LINE_HEIGHT = 60, 8, 1.4
SKEW, BLUR, GRAIN, JPEG_QUALITY = 0.3, 0.8, 14, 90


@dataclass(frozen=True)
class Row:
    """One file or drawing of the scan. `match` and `reported` in percent."""

    dpi: int
    maker: str
    bytes: int | None
    of_original: float | None
    body_bytes: int | None
    seconds: float | None
    match: float
    reported: int | None


def texts() -> list[str]:
    """The true text of each page: sentences of the samples in a fixed random order."""
    prose = " ".join(b.text for b in (*AGREEMENT, *SCAN) if isinstance(b, Paragraph))
    sentences = [sentence.strip() + "." for sentence in prose.split(".") if sentence.strip()]
    chance = random.Random(300)
    return [" ".join(chance.choices(sentences, k=SENTENCES)) for _ in range(PAGES)]


def typeset(pages: Sequence[str], path: Path) -> list[str]:
    """Set the pages in type; return what fits on each."""
    inner = pymupdf.Rect(MARGIN, MARGIN, A4.width - MARGIN, A4.height - MARGIN)
    with pymupdf.open() as document:
        for text in pages:
            page = document.new_page(width=A4.width, height=A4.height)
            kept = text
            while page.insert_textbox(
                inner, kept, fontsize=FONT_SIZE, fontname="tiro", lineheight=LINE_HEIGHT
            ) < 0:  # fmt: skip
                kept = kept.rpartition(" ")[0]
        document.save(path)
        return [page.get_text() for page in document]


def scan(clean: Path, path: Path) -> None:
    """Print and scan it: every page becomes one grey JPEG."""
    with pymupdf.open(clean) as document, pymupdf.open() as scanned:
        for page in document:
            pixels = page.get_pixmap(dpi=SCAN_DPI, colorspace=pymupdf.csGRAY)
            page_image = Image.frombytes("L", (pixels.width, pixels.height), pixels.samples)
            page_image = page_image.point(lambda level: 30 + level * 0.84)
            page_image = page_image.rotate(SKEW, Image.Resampling.BICUBIC, fillcolor=244)
            page_image = page_image.filter(ImageFilter.GaussianBlur(BLUR))
            grain = Image.effect_noise(page_image.size, GRAIN)
            jpeg = io.BytesIO()
            ImageChops.add(page_image, grain, offset=-128).save(jpeg, "JPEG", quality=JPEG_QUALITY)
            leaf = scanned.new_page(width=A4.width, height=A4.height)
            leaf.insert_image(leaf.rect, stream=jpeg.getvalue())
        scanned.save(path)


def read(path: Path, dpi: int) -> list[str]:
    """Tesseract's text of every page, drawn at `dpi`."""
    with pymupdf.open(path) as document:
        pictures = [
            page.get_pixmap(dpi=dpi, colorspace=pymupdf.csGRAY).tobytes("png") for page in document
        ]
    command = ["tesseract", "stdin", "stdout", "--dpi", str(dpi)]

    def text_of(picture: bytes) -> str:
        done = subprocess.run(command, input=picture, capture_output=True, check=True,
                              env={**os.environ, "OMP_THREAD_LIMIT": "1"})  # fmt: skip
        return done.stdout.decode()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(text_of, pictures))


def match(truth: Sequence[str], found: Sequence[str]) -> float:
    """Percent, the mean of the pages."""
    shares = []
    for true, read_text in zip(truth, found, strict=True):
        wanted = Counter(words(true))
        shares.append((wanted & Counter(words(read_text))).total() / wanted.total())
    return round(100 * statistics.mean(shares), 1)


async def shrink(maker: str, source: Path, dpi: int, target: Path) -> float | None:
    """Seconds it took, None where that shrinker is absent or fails."""
    settings = load_settings().pdf
    started = time.perf_counter()
    try:
        async with PdfSession(settings, PAGES) as pdf:
            if maker == "ghostscript":
                await ghostscript.rewrite(source, dpi, target, settings.shrink_time_limit)
            else:
                await pdf.rewrite_images(source, dpi, target, settings.shrink_time_limit)
            await pdf.compare(source, target)
    except RagServiceError as error:
        print(f"{maker} at {dpi} DPI: {error.message}", file=sys.stderr)
        return None
    return round(time.perf_counter() - started, 2)


def drawn(source: Path, dpi: int, truth: Sequence[str]) -> Row:
    size = source.stat().st_size if dpi == SCAN_DPI else None
    return Row(
        dpi, "as scanned" if size else "drawn", size, 1.0 if size else None,
        4 * math.ceil(size / 3) if size else None, None, match(truth, read(source, dpi)),
        REPORTED.get(dpi),
    )  # fmt: skip


def shrunk(maker: str, source: Path, dpi: int, truth: Sequence[str]) -> Row | None:
    target = source.with_name(f"{maker}-{dpi}.pdf")
    seconds = asyncio.run(shrink(maker, source, dpi, target))
    if seconds is None:
        return None
    size = target.stat().st_size
    return Row(
        dpi, maker, size, round(size / source.stat().st_size, 3), 4 * math.ceil(size / 3), seconds,
        match(truth, read(target, dpi)), REPORTED.get(dpi),
    )  # fmt: skip


def measure(folder: Path) -> list[Row]:
    truth = typeset(texts(), folder / "clean.pdf")
    source = folder / "scan.pdf"
    scan(folder / "clean.pdf", source)
    rows: list[Row | None] = []
    for dpi in TIERS:
        rows.append(drawn(source, dpi, truth))
        if dpi in SHRUNK_TIERS:
            rows += [shrunk(maker, source, dpi, truth) for maker in ("ghostscript", "pymupdf")]
    return [row for row in rows if row is not None]


def show(rows: Sequence[Row]) -> None:
    print(f"{'DPI':>4} {'file':12} {'bytes':>10} {'of original':>11} {'in base64':>10} "
          f"{'seconds':>8} {'word match':>10} {'report':>7}")  # fmt: skip
    for row in rows:
        size = f"{row.bytes:10,}" if row.bytes is not None else f"{'':10}"
        share = f"{row.of_original:11.1%}" if row.of_original is not None else f"{'':11}"
        body = f"{row.body_bytes:10,}" if row.body_bytes is not None else f"{'':10}"
        took = f"{row.seconds:8.2f}" if row.seconds is not None else f"{'':8}"
        note = f"{row.reported:6} %" if row.reported is not None else ""
        print(f"{row.dpi:4} {row.maker:12} {size} {share} {body} {took} {row.match:8.1f} % {note}")


def main() -> None:
    if shutil.which("tesseract") is None:
        sys.exit("tesseract is absent: apt-get install tesseract-ocr")
    load = os.getloadavg()[0]
    print(f"{PAGES} pages at {SCAN_DPI} DPI, {os.cpu_count()} cores, load {load:.1f} before")
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder))
    show(rows)
    RESULTS.mkdir(parents=True, exist_ok=True)
    report = {
        "cores": os.cpu_count(), "load_before": load, "pages": PAGES, "scan_dpi": SCAN_DPI,
        "font_size": FONT_SIZE, "rows": [asdict(row) for row in rows],
    }  # fmt: skip
    (RESULTS / "downsample.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
