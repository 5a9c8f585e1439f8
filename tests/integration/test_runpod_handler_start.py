"""Start and end of the RunPod handler with its servers, and the errors that stop a start.

The OCR server that it starts and watches is the real CPU server.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.endpoint import ENVIRONMENT, Endpoint, job_input, open_endpoint
from tests.fakes.ocr_server import FakeOcrServer
from tests.fakes.runpod_workers import HANDLER
from tests.fakes.scans import Mark, new_number
from tests.net import free_port
from tests.processes import Programs


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Endpoint]:
    """An endpoint without workers yet."""
    with open_endpoint(tmp_path) as endpoint:
        yield endpoint


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"RAG_SERVICE_HANDLER_START_TIMEOUT": "1"}, "The OCR server did not start within 1 s"),
        ({"GLMOCR_ENGINE": "transformers"}, "GLMOCR_ENGINE is 'transformers'"),
        ({"RUNPOD_HANDLER_SKIP_GPU_CHECK": "false"}, "nvidia-smi cannot be run"),
        ({"RUNPOD_HANDLER_SKIP_GPU_CHECK": "perhaps"}, "handler.skip_gpu_check"),
        ({"GLMOCR_BASE_URL": ""}, "GLMOCR_BASE_URL is not set: the image sets it"),
    ],
)
def test_a_failed_start_check_ends_the_worker(
    fresh: Endpoint, variables: dict[str, str], sentence: str
) -> None:
    fresh.ocr.refuse()
    fresh.workers.start(PATH="/nonexistent", **variables)
    (worker,) = fresh.workers.all
    assert worker.program.wait() == 1
    assert sentence in worker.program.text
    assert "rag-service up" not in worker.program.text


@pytest.mark.parametrize("variables", [{}, {"GLMOCR_ENGINE": "none"}, {"OCR_MAX_TOKENS": "many"}])
def test_outside_runpod_the_handler_names_the_reason_and_exits(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    with Programs(ENVIRONMENT | variables, tmp_path) as programs:
        program = programs.start("by-hand", HANDLER)
        assert program.wait() == 2
        (line,) = program.text.splitlines()
    assert "runs in a RunPod serverless worker only" in line


def test_a_server_with_another_model_ends_the_worker_before_the_time_limit(fresh: Endpoint) -> None:
    fresh.workers.start(GLMOCR_MODEL="another", RAG_SERVICE_HANDLER_START_TIMEOUT="86400")
    (worker,) = fresh.workers.all
    assert worker.program.wait() == 1
    assert "does not serve the model 'another' (GLMOCR_MODEL)" in worker.program.text


@pytest.mark.parametrize("status", [401, 404, 503])
def test_the_wait_for_a_loading_server_is_logged(fresh: Endpoint, status: int) -> None:
    fresh.ocr.models_status = status
    fresh.workers.start()
    (worker,) = fresh.workers.all
    waits = lambda: "Waiting for the OCR server: " in worker.program.text  # noqa: E731
    fresh.programs.wait_until(waits, "the reason is logged")
    assert f"HTTP {status}" in worker.program.text
    fresh.ocr.models_status = 200
    fresh.workers.wait_ready()


def test_a_server_that_ends_at_the_start_ends_the_worker(fresh: Endpoint) -> None:
    fresh.ocr.refuse()
    fresh.workers.start(command=[*HANDLER, "sh", "-c", "echo no such model; exit 7"])
    (worker,) = fresh.workers.all
    assert worker.program.wait() == 1
    assert "ended with exit code 7; last output: no such model" in worker.program.text


def test_a_killed_server_fails_the_job_and_ends_the_worker(fresh: Endpoint) -> None:
    port = free_port()
    server = [sys.executable, "-m", "rag_service.cli.main", "cpu-ocr-server"]
    fresh.workers.start(
        command=[*HANDLER, *server],
        GLMOCR_BASE_URL=f"http://127.0.0.1:{port}",
        GLMOCR_MODEL="pp-ocrv6-tiny",
        RAG_SERVICE_CPU_OCR_PORT=str(port),
    )
    (worker,) = fresh.workers.all
    remote_id = fresh.post(job_input(new_number(), list(range(1, 21))))
    fresh.programs.wait_until(lambda: fresh.stored_pages, "a page is stored")
    psutil.Process(_server_pid(worker.program.family())).kill()
    error = fresh.error(remote_id)
    assert error["error_type"] == "ocr_server_unhealthy"
    assert "The OCR server ended with exit code -9" in error["error_message"]
    assert worker.program.wait() == 1


def _server_pid(family: list[int]) -> int:
    return next(pid for pid in family if "cpu-ocr-server" in psutil.Process(pid).cmdline())


def test_a_layout_model_that_cannot_load_ends_the_worker(fresh: Endpoint) -> None:
    variables = {"RAG_SERVICE_LAYOUT_MODEL": "pp_doclayout_v3"}
    fresh.workers.start(RAG_SERVICE_OCR_LAYOUT="auto", **variables)
    (worker,) = fresh.workers.all
    assert worker.program.wait() == 1
    assert "pp_doclayout_v3 cannot load" in worker.program.text


def test_a_job_is_read_by_runpods_local_api(tmp_path: Path) -> None:
    """As docs/runpod.md describes: no endpoint, no GPU."""
    port = free_port()
    with FakeOcrServer() as ocr, Programs(ENVIRONMENT, tmp_path) as programs:
        variables = {
            "GLMOCR_BASE_URL": ocr.url,
            "RAG_SERVICE_OCR_LAYOUT": "page",
            "RUNPOD_HANDLER_VOLUME": str(tmp_path / "volume"),
        }
        argv = [*HANDLER, "--rp_serve_api", "--rp_api_port", str(port)]
        program = programs.start("local", argv, **variables)
        programs.wait_until(lambda: "Uvicorn running" in program.text, "it listens")
        document = new_number()
        job = {"input": job_input(document, [7])}
        outputs = [
            httpx.post(f"http://localhost:{port}/runsync", json=job, timeout=60).json()["output"]
            for _ in range(2)
        ]
        [page] = outputs[0]["pages"]
        assert (page["page"], page["error"]) == (7, None)
        assert page["markdown"]
        assert outputs[1]["pages"] == outputs[0]["pages"]
        assert len(ocr.of(Mark(document, 1))) == 1
        program.signal(signal.SIGTERM)
        assert program.wait() in (0, -signal.SIGTERM)
