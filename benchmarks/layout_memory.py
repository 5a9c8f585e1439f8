"""Memory of an ocr worker with a layout model in each fork, and with one layout server.

    python -m benchmarks.layout_memory

A worker's main process has loaded what Celery's has; each of its forks holds a render child with
a scan open, has looked at its pages, and has found their layout: with a model that it loaded
itself, as people do who give each fork one, or with the layout server's client. PSS of the whole
tree, so that what forks share counts once. Models: CDLA through ONNX Runtime, and
PP-DocLayoutV3's architecture with random weights through torch on the CPU, where the extra
layout-torch is installed. Prints a table and writes benchmarks/results/layout_memory.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil

from benchmarks.stack import RESULTS
from rag_service.config.loader import get_settings
from rag_service.layout.labels import LABELS

FORKS = (1, 2, 4, 8)
LIMIT_MIB = 150
DPI = 150
PAGES = 2
CDLA, PP_DOCLAYOUT = "cdla", "pp_doclayout_v3"
IN_EACH_FORK, SERVER = "in each fork", "one server"
_MIB = 1 << 20
# What a fork reports with once it holds all that it needs.
_HOLDS = b"."


@dataclass(frozen=True)
class Tree:
    """PSS in MiB of one worker with its forks; `server` is the layout server's part."""

    model: str
    where: str
    forks: int
    total: float
    main: float
    a_fork: float
    a_render_child: float
    server: float


def scan(target: Path) -> None:
    """Pages of prose in two columns, as pictures."""
    import pymupdf

    prose = "The harbour master wrote his report on the evening of the fourth of May. " * 30
    with pymupdf.open() as drawn, pymupdf.open() as scanned:
        for number in range(PAGES):
            page = drawn.new_page()
            page.insert_text((70, 80), f"Report number {number}", fontsize=20)
            for left in (50, 310):
                page.insert_textbox((left, 120, left + 240, 780), prose, fontsize=10)
            picture = page.get_pixmap(dpi=DPI, colorspace=pymupdf.csGRAY).tobytes("jpeg")
            scanned.new_page().insert_image(page.rect, stream=picture)
        scanned.save(target)


def random_weights(folder: Path) -> None:
    """PP-DocLayoutV3 as published but for what it has learnt."""
    import torch
    from transformers import PPDocLayoutV3Config, PPDocLayoutV3ForObjectDetection

    torch.manual_seed(7)
    config = PPDocLayoutV3Config(num_labels=len(LABELS))
    PPDocLayoutV3ForObjectDetection(config).save_pretrained(folder)


def measure(model: str, where: str, forks: int, pdf: Path, folder: Path) -> Tree:
    """Start one worker, wait until every fork holds what it needs, and weigh the tree."""
    with worker(model, where, forks, pdf, folder) as main:
        children = {child.pid: pss(child) for child in main.children(recursive=True)}
        kinds = {pid: kind(psutil.Process(pid), main.pid) for pid in children}
        own = pss(main)

    def sum_of(wanted: str) -> float:
        return sum(size for pid, size in children.items() if kinds[pid] == wanted)

    sizes = (
        own + sum(children.values()), own, sum_of("fork") / forks,
        sum_of("render child") / forks, sum_of("server"),
    )  # fmt: skip
    return Tree(model, where, forks, *(round(size, 1) for size in sizes))


def pss(process: psutil.Process) -> float:
    return float(process.memory_full_info().pss) / _MIB


def kind(process: psutil.Process, main: int) -> str:
    if "workers.servers.layout.layout_server" in process.cmdline():
        return "server"
    return "fork" if process.ppid() == main else "render child"


@contextmanager
def worker(model: str, where: str, forks: int, pdf: Path, folder: Path) -> Iterator[psutil.Process]:
    with tempfile.TemporaryDirectory() as data_dir:
        environment = {
            **os.environ,
            "RAG_SERVICE_DATA_DIR": data_dir,
            "RAG_SERVICE_OCR_LAYOUT": "regions",
            "RAG_SERVICE_LAYOUT_MODEL": model,
            "RAG_SERVICE_LAYOUT_FOLDER": str(folder),
            "RAG_SERVICE_LAYOUT_PATIENCE": "1800",
            # Celery's application wants addresses; nothing is sent to them.
            "REDIS_URL": "redis://127.0.0.1:1/0",
            "DATABASE_URL": "postgresql://127.0.0.1:1/none",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.layout_memory", where, str(forks), str(pdf)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            if process.stdout is None or process.stdout.read(1) != _HOLDS:
                raise RuntimeError(f"The worker with {forks} forks did not come up.")
            yield psutil.Process(process.pid)
        finally:
            # It ends its children when its input ends.
            process.communicate()


def be_worker(where: str, forks: int, pdf: Path) -> None:
    """The worker's main process: Celery's imports, the layout server where wanted, forks."""
    from workers.celery_app import app
    from workers.servers.layout.layout_supervisor import LayoutSupervisor

    app.loader.import_default_modules()
    layout = LayoutSupervisor(get_settings())
    if where == SERVER:
        layout.start()
    holding, tell = os.pipe()
    pids = [fork(where, pdf, tell) for _ in range(forks)]
    for _ in pids:
        os.read(holding, 1)
    os.write(sys.stdout.fileno(), _HOLDS)
    sys.stdin.read()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    layout.stop()


def fork(where: str, pdf: Path, tell: int) -> int:
    from rag_service.runtime.bounded_child import die_with

    parent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        die_with(parent)
        asyncio.run(hold(where, pdf, tell))
    finally:
        os._exit(1)


async def hold(where: str, pdf: Path, tell: int) -> None:
    """What a fork has in its hands while it reads a document by its blocks."""
    from rag_service.layout.layout_client import LayoutClient
    from rag_service.layout.model_loader import load_model
    from rag_service.pdf.session import PdfSession

    settings = get_settings()
    model = load_model(settings.layout) if where == IN_EACH_FORK else None
    async with PdfSession(settings.pdf, PAGES) as render, LayoutClient(settings) as client:
        await render.open(pdf, "application/pdf")
        for number in range(1, PAGES + 1):
            picture = await render.layout_picture(number, DPI)
            if model is None:
                boxes = (await client.find(picture.jpeg)).boxes
            else:
                boxes = tuple(model.find([model.read(picture.jpeg)])[0])
            await render.crops(number, DPI, [box.bbox for box in boxes])
        os.write(tell, _HOLDS)
        while True:
            signal.pause()


def growth(trees: list[Tree]) -> float:
    """MiB a fork, from the fewest to the most forks."""
    return (trees[-1].total - trees[0].total) / (trees[-1].forks - trees[0].forks)


def compare(models: list[str]) -> None:
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"PSS in MiB of a worker's whole process tree; {machine}\n")
    print(f"{'':16} {'model':13}" + "".join(f"{f'{n} forks':>10}" for n in FORKS)
          + f"{'a fork':>9} {'server':>8}")  # fmt: skip
    results = []
    with tempfile.TemporaryDirectory() as name:
        pdf, weights = Path(name) / "scan.pdf", Path(name) / "weights"
        scan(pdf)
        if PP_DOCLAYOUT in models:
            random_weights(weights)
        for model in models:
            for where in (IN_EACH_FORK, SERVER):
                trees = [measure(model, where, forks, pdf, weights) for forks in FORKS]
                results.append(report(model, where, trees))
    RESULTS.mkdir(exist_ok=True)
    summary = {"machine": machine, "limit_mib_a_fork": LIMIT_MIB, "rows": results}
    (RESULTS / "layout_memory.json").write_text(json.dumps(summary, indent=1) + "\n")


def report(model: str, where: str, trees: list[Tree]) -> dict[str, object]:
    """Print one row and return it for the JSON."""
    grown = growth(trees)
    verdict = f"wanted {LIMIT_MIB}: {'met' if grown <= LIMIT_MIB else 'missed'}"
    totals = "".join(f"{tree.total:10.0f}" for tree in trees)
    print(f"{model:16} {where:13}{totals}{grown:9.0f} {trees[-1].server:8.0f}"
          + (f"   {verdict}" if where == SERVER else ""))  # fmt: skip
    return {
        "model": model,
        "where": where,
        "growth_a_fork": round(grown, 1),
        "trees": [asdict(tree) for tree in trees],
    }


def main() -> None:
    if len(sys.argv) > 1:
        be_worker(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
        return
    models = [CDLA]
    if find_spec("torch") and find_spec("transformers"):
        models.append(PP_DOCLAYOUT)
    else:
        print(f"{PP_DOCLAYOUT}: absent, pip install -e '.[layout-torch]'")
    compare(models)


if __name__ == "__main__":
    main()
