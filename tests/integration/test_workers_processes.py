"""Worker processes: their imports, the number of forks, what they refuse."""

import json
import subprocess
import sys

import pytest

from rag_service.config.loader import get_settings
from rag_service.database.connection_budget import worker_connections
from rag_service.jobs import wake_ups
from rag_service.states import Stage
from tests.conftest import forget_connections
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
    """The service with a worker of both stages, started with Celery's own command."""
    folder = tmp_path_factory.mktemp("processes")
    with open_service(stack, folder, RAG_SERVICE_OCR_OUTAGE_LIMIT="1") as service:
        service.worker = service.programs.start_celery(
            "-Q", "ocr,prepare", OCR_WORKER_CONCURRENCY="3"
        )
        service.programs.wait_ready(service.worker)
        yield service


def test_the_process_that_forks_has_no_heavy_imports_and_one_thread(service):
    found = subprocess.run(
        [sys.executable, "-c", LOOK], env=service.programs.env, capture_output=True, check=True
    )
    looked = json.loads(found.stdout)
    assert looked == {"heavy": [], "threads": ["MainThread"], "kernel_threads": 1}


def test_a_plain_celery_worker_has_the_configured_number_of_forks(service):
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
def test_a_worker_without_an_ocr_server_does_not_start(service, variables, missing):
    """It could send no page of any document."""
    worker = service.programs.start_celery("-Q", "prepare,ocr", **variables)
    assert worker.wait() == 2
    assert f"({missing})" in worker.text


def test_only_json_is_accepted_from_the_broker(service):
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


def test_a_worker_without_maintenance_processes_all_waiting_runs(service):
    """One wake-up message is enough: the end of a run sends one for the next run."""
    ids = [service.add(scan(new_number(), 1)) for _ in range(5)]
    assert [service.wait_for(one).status for one in ids] == ["processed"] * 5


def test_a_fork_at_work_has_at_most_two_database_connections(service):
    """One for its work, one for the thread that renews the lease."""
    forget_connections()
    others = """
        SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid()
    """
    seen = []
    ids = [service.add(scan(new_number(), 8)) for _ in range(4)]
    forget_connections()

    def all_ended():
        seen.append(service.rows(others)[0].count)
        return all(service.view(one).latest_run.status == "processed" for one in ids)

    service.programs.wait_until(all_ended, "all documents are processed")
    # Some queries of this process open a second connection of its own.
    assert max(seen) <= worker_connections(3) + 1
    assert max(seen) > 3


@pytest.fixture
def broker_unreachable(monkeypatch):
    """This process cannot reach the broker, so it sends no wake-up message."""
    with monkeypatch.context() as patch:
        patch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")
        get_settings.cache_clear()
        wake_ups._sender.cache_clear()
        yield
    get_settings.cache_clear()
    wake_ups._sender.cache_clear()


def test_maintenance_notifies_for_an_unannounced_run_and_fails_it_after_a_long_outage(
    service, broker_unreachable
):
    """No message was sent for the run; the server is unreachable beyond ocr.outage_limit."""
    service.ocr.refuse()
    one = Scan(service, 1)
    service.programs.start_maintenance()
    view = one.ended()
    assert (view.status, view.error.code, view.error.retryable) == (
        "failed", "ocr_unavailable", True,
    )  # fmt: skip
    assert service.ocr.url in view.error.message
    assert one.charges() == (0, 0, 0)
