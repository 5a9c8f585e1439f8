"""Worker processes as such: what they import, how many forks they have, what they refuse."""

import json
import subprocess
import sys

import pytest

from rag_service.config.loader import get_settings
from rag_service.jobs import wake_ups
from rag_service.states import Stage
from tests.fakes.scans import new_number, scan
from tests.service import Scan, open_service

HEAVY = ("onnxruntime", "torch", "pymupdf", "fitz", "numpy", "PIL", "faster_paddle")
LOOK = f"""
import json, sys, threading
import workers.celery_app, workers.prepare_worker, workers.ocr_worker, workers.main_process
import os
print(json.dumps({{
    "heavy": [name for name in {HEAVY} if name in sys.modules],
    "threads": [thread.name for thread in threading.enumerate()],
    "kernel_threads": len(os.listdir("/proc/self/task")),
}}))
"""


@pytest.fixture(scope="module")
def service(stack, tmp_path_factory):
    """A worker of both stages, started by nothing but Celery's own command."""
    folder = tmp_path_factory.mktemp("processes")
    with open_service(stack, folder, RAG_SERVICE_OCR_OUTAGE_LIMIT="1") as service:
        service.worker = service.programs.start_celery(
            "-Q", "ocr,prepare", OCR_WORKER_CONCURRENCY="3"
        )
        service.programs.wait_ready(service.worker)
        yield service


def test_what_forks_are_made_from_is_light_and_has_one_thread(service):
    found = subprocess.run(
        [sys.executable, "-c", LOOK], env=service.programs.env, capture_output=True, check=True
    )
    looked = json.loads(found.stdout)
    assert looked == {"heavy": [], "threads": ["MainThread"], "kernel_threads": 1}


def test_a_bare_celery_worker_takes_the_configured_forks_whatever_the_cores(service):
    assert len(service.worker.forks()) == 3
    rows = service.rows("SELECT stage, forks FROM workers ORDER BY stage")
    assert [tuple(row) for row in rows] == [("ocr", 3), ("prepare", 3)]


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({"GLMOCR_BASE_URL": ""}, "GLMOCR_BASE_URL"),
        ({"RAG_SERVICE_OCR_TRANSPORT": "runpod", "RUNPOD_ENDPOINT_ID": "ep"}, "RUNPOD_API_KEY"),
    ],
)
def test_a_worker_with_no_server_to_read_with_does_not_start(service, variables, missing):
    """No page of any document could travel."""
    worker = service.programs.start_celery("-Q", "prepare,ocr", **variables)
    assert worker.wait() == 2
    assert f"({missing})" in worker.text


def test_nothing_but_json_is_taken_from_the_broker(service):
    wake_ups._sender().send_task(
        wake_ups.TASK_NAMES[Stage.PREPARE],
        kwargs={"run_id": "0" * 32},
        queue=Stage.PREPARE.value,
        serializer="pickle",
    )
    refused = lambda: "ContentDisallowed" in service.worker.text  # noqa: E731
    service.programs.wait_until(refused, "the pickle is refused")
    view = service.wait_for(service.add(scan(new_number(), 1)))
    assert view.status == "processed"


def test_a_worker_without_maintenance_works_through_what_waits(service):
    """One doorbell is enough: whoever ends a run rings for the next."""
    ids = [service.add(scan(new_number(), 1)) for _ in range(5)]
    assert [service.wait_for(one).status for one in ids] == ["processed"] * 5


@pytest.fixture
def broker_away(monkeypatch):
    """The broker cannot be reached from here, so no doorbell of ours rings."""
    with monkeypatch.context() as patch:
        patch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")
        get_settings.cache_clear()
        wake_ups._sender.cache_clear()
        yield
    get_settings.cache_clear()
    wake_ups._sender.cache_clear()


def test_a_document_whose_doorbell_never_rang_is_found_and_a_long_outage_ends_by_name(
    service, broker_away
):
    """Only maintenance can tell the worker; then the server stays away beyond ocr.outage_limit."""
    service.ocr.refuse()
    one = Scan(service, 1)
    service.programs.start_maintenance()
    view = one.ended()
    assert (view.status, view.error.code, view.error.retryable) == (
        "failed", "ocr_unavailable", True,
    )  # fmt: skip
    assert service.ocr.url in view.error.message
    assert one.charges() == (0, 0, 0)
