"""Documents a second that the API accepts over HTTP, and its memory while a large file comes in.

    python -m benchmarks.intake

Small unique PDFs are uploaded at several concurrencies to the real API process over PostgreSQL
and Valkey, both as `up` runs them, flushed writes included. Beside it, the same uploads to a bare
FastAPI endpoint that saves its UploadFile and knows no database. Then one upload of 500 MB to
each, with the process's proportional memory (PSS) before, at most during, and after. Prints
tables and writes benchmarks/results/intake.json.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.stack import RESULTS, running_stack
from rag_service.cli.start_plan import API
from rag_service.embedded.folder import free_port

CONCURRENCIES = (1, 4, 16)
DOCUMENTS = 300
WARM_UP = 20
PDF_BYTES = 20_000
LARGE_BYTES = 500_000_000
CHUNK = 1_000_000
SAMPLE_SECONDS = 0.02
MIB = 1024 * 1024
BOUNDARY = "benchmark-boundary"
PATIENCE = httpx.Timeout(120)

BARE = """
import shutil, sys, uuid
import uvicorn
from fastapi import FastAPI, UploadFile

app = FastAPI()

@app.post("/documents", status_code=202)
def save(file: UploadFile) -> dict[str, str]:
    name = uuid.uuid4().hex
    with open(f"{sys.argv[2]}/{name}", "wb") as target:
        shutil.copyfileobj(file.file, target)
    return {"id": name}

uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", access_log=False)
"""


@dataclass(frozen=True)
class Rate:
    """Uploads of small documents at one concurrency; latencies in milliseconds."""

    server: str
    concurrency: int
    documents_per_second: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Memory:
    """PSS of the server's process in MiB around one large upload."""

    server: str
    before: float
    peak: float
    after: float
    seconds: float


def small_pdf() -> bytes:
    """Bytes that begin as a PDF does and are like no others."""
    return b"%PDF-1.7\n% " + uuid.uuid4().hex.encode() + b"\n" + os.urandom(PDF_BYTES)


def upload(client: httpx.Client, content: bytes) -> float:
    """Milliseconds until the document is accepted."""
    began = time.perf_counter()
    answer = client.post("/documents", files={"file": ("a.pdf", content)})
    if answer.status_code != 202:
        raise RuntimeError(f"{answer.status_code}: {answer.text}")
    return (time.perf_counter() - began) * 1000


def rate(server: str, url: str, concurrency: int) -> Rate:
    contents = [small_pdf() for _ in range(DOCUMENTS)]
    limits = httpx.Limits(max_connections=concurrency)
    with (
        httpx.Client(base_url=url, timeout=PATIENCE, limits=limits) as client,
        ThreadPoolExecutor(concurrency) as pool,
    ):
        for content in [small_pdf() for _ in range(WARM_UP)]:
            upload(client, content)
        began = time.perf_counter()
        latencies = list(pool.map(lambda content: upload(client, content), contents))
        seconds = time.perf_counter() - began
    percentiles = statistics.quantiles(latencies, n=100)
    return Rate(
        server,
        concurrency,
        round(DOCUMENTS / seconds, 1),
        round(percentiles[49], 1),
        round(percentiles[98], 1),
    )


def large_body() -> Iterator[bytes]:
    """A multipart body made while it is sent, so that the client holds none of it."""
    yield (
        f"--{BOUNDARY}\r\n"
        'Content-Disposition: form-data; name="file"; filename="large.pdf"\r\n\r\n'
        f"%PDF-1.7\n% {uuid.uuid4().hex}\n"
    ).encode()
    block = os.urandom(CHUNK)
    for _ in range(LARGE_BYTES // CHUNK):
        yield block
    yield f"\r\n--{BOUNDARY}--\r\n".encode()


def memory(server: str, url: str, process: psutil.Process) -> Memory:
    headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    before = pss(process)
    began = time.perf_counter()
    with watched(process) as samples:
        answer = httpx.post(
            f"{url}/documents", content=large_body(), headers=headers, timeout=PATIENCE
        )
    seconds = time.perf_counter() - began
    if answer.status_code != 202:
        raise RuntimeError(f"{answer.status_code}: {answer.text}")
    return Memory(server, before, max(samples), pss(process), round(seconds, 2))


def pss(process: psutil.Process) -> float:
    """Proportional set size in MiB, if the system reports it, else the resident set size."""
    found = process.memory_full_info()
    return round(getattr(found, "pss", found.rss) / MIB, 1)


@contextmanager
def watched(process: psutil.Process) -> Iterator[list[float]]:
    """Samples of the process's memory while the block runs."""
    samples = [pss(process)]
    over = threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLE_SECONDS):
            samples.append(pss(process))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


@contextmanager
def our_server() -> Iterator[tuple[str, psutil.Process]]:
    with running_stack(durable=True) as stack:
        stack.start([stack.plan.api()])
        [pid] = [program.pid for program in stack.programs() if program.name == API]
        yield stack.plan.api_url(), psutil.Process(pid)


@contextmanager
def bare_server() -> Iterator[tuple[str, psutil.Process]]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="rag-bench-") as folder:
        process = subprocess.Popen([sys.executable, "-c", BARE, str(port), folder])
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_up(url, process)
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


def wait_until_up(url: str, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            httpx.get(url)
        except httpx.TransportError:
            time.sleep(0.05)
            continue
        return
    raise RuntimeError("The bare server did not start.")


def measure() -> tuple[list[Rate], list[Memory]]:
    """The two take turns, so that other work on the machine meets both alike."""
    with our_server() as service, bare_server() as bare:
        servers = {"rag_service": service, "bare FastAPI": bare}
        rates = [
            rate(name, url, concurrency)
            for concurrency in CONCURRENCIES
            for name, (url, _) in servers.items()
        ]
        memories = [memory(name, url, process) for name, (url, process) in servers.items()]
    return rates, memories


def show(console: Console, title: str, rows: Sequence[Any]) -> None:
    table = Table(title=title)
    for name in asdict(rows[0]):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(str(value) for value in asdict(row).values()))
    console.print(table)


def main() -> None:
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before"
    rates, memories = measure()
    console = Console()
    show(console, f"Small PDFs ({PDF_BYTES} bytes) accepted over HTTP; {machine}", rates)
    show(console, f"Memory (MiB) around an upload of {LARGE_BYTES} bytes", memories)
    RESULTS.mkdir(exist_ok=True)
    result = {
        "machine": machine,
        "documents": DOCUMENTS,
        "document_bytes": PDF_BYTES,
        "large_bytes": LARGE_BYTES,
        "rates": [asdict(row) for row in rates],
        "memory": [asdict(row) for row in memories],
    }
    (RESULTS / "intake.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
