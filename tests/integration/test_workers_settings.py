"""A wrong setting that shows only at work is reported, and not charged to a document."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import pytest

from rag_service.config.loader import get_settings
from rag_service.config.options import Settings
from rag_service.documents.storage import DocumentStore
from rag_service.errors import ConfigurationError
from rag_service.jobs import server_state
from rag_service.states import RunState, ServerState, Stage
from tests import simulation as sim


@pytest.fixture
def ocr_worker(settings: Settings) -> ModuleType:
    """Import after there is a broker, because the application is created with its URL."""
    # A new store is marked only while the database has no documents.
    DocumentStore(settings).require_reachable()
    return importlib.import_module("workers.ocr_worker")


def run_next(ocr_worker: ModuleType) -> str:
    outcome: str = ocr_worker.work_on_next(Stage.OCR, "a-task", ocr_worker.read).text
    return outcome


def test_a_worker_without_a_key_parks_its_run(
    ocr_worker: ModuleType, environment: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RUNPOD_API_KEY", raising=False)
    environment(RAG_SERVICE_OCR_TRANSPORT="runpod", RUNPOD_ENDPOINT_ID="ep")
    run = sim.ready_run()
    assert "waits for the OCR server" in run_next(ocr_worker)
    row = sim.run_row(run.id)
    assert (row.state, row.error_code, row.crashes) == (RunState.READY, None, 0)
    record = server_state.get(get_settings().page_server or "")
    assert record is not None
    assert record.state is ServerState.MISCONFIGURED
    assert "RUNPOD_API_KEY" in record.message


def test_a_configuration_error_fails_no_document(
    ocr_worker: ModuleType, environment: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read_run(_: object) -> None:
        raise ConfigurationError("storage.url: not a bucket.")

    environment(GLMOCR_BASE_URL="http://ocr.example")
    monkeypatch.setattr(ocr_worker, "read_run", read_run)
    run = sim.ready_run()
    run_next(ocr_worker)
    assert sim.run_row(run.id).state == RunState.READY
    record = server_state.get("http://ocr.example")
    assert record is not None
    assert "not a bucket" in record.message
