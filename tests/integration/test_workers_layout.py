"""An ocr worker and its layout server: started first, restarted, stopped with the worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import psutil
import pytest

from rag_service.config.loader import load_settings
from rag_service.layout.layout_client import readiness
from tests.fakes.ocr_server import Gate, Reply
from tests.fakes.page_pictures import scanned
from tests.processes import Program, is_alive, kill
from tests.service import Service, open_service

COUNTS = (3, 4, 5, 1, 6, 3, 4, 5)
LIMIT = 200.0


@pytest.fixture(scope="module")
def service(stack, tmp_path_factory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("layout")
    with open_service(stack, folder, RAG_SERVICE_OCR_LAYOUT="regions") as service:
        yield service


def layout_server(worker: Program) -> int:
    (pid,) = [
        pid
        for pid in worker.forks()
        if "workers.servers.layout.layout_server" in psutil.Process(pid).cmdline()
    ]
    return pid


def test_a_worker_whose_layout_model_cannot_load_does_not_start(service) -> None:
    worker = service.programs.start_worker("ocr", 1, RAG_SERVICE_LAYOUT_MODEL="pp_doclayout_v3")
    assert worker.wait() == 2
    assert "layout.model: pp_doclayout_v3 cannot load" in worker.text
    assert "Traceback" not in worker.text


def test_a_prepare_worker_starts_no_layout_server(service) -> None:
    worker = service.programs.start_worker("prepare", 1)
    service.programs.wait_ready(worker)
    assert not any("layout_server" in " ".join(psutil.Process(p).cmdline()) for p in worker.forks())
    worker.kill()


@pytest.mark.timeout(600)
def test_a_layout_server_killed_in_a_document_loses_and_doubles_nothing(
    service,
) -> None:
    gate = Gate()
    service.ocr.default = Reply(text="What the block says.", gate=gate)
    ocr = service.programs.start_worker("ocr", 1)
    prepare = service.programs.start_worker("prepare", 1)
    service.programs.wait_ready(ocr, prepare)
    assert readiness(load_settings()).ok

    document_id = service.add(scanned(COUNTS))
    service.programs.wait_until(gate.arrived.is_set, "the first block is at the OCR server")
    first = layout_server(ocr)
    kill(first)
    gate.open()
    view = service.wait_for(document_id, seconds=LIMIT)

    assert view.latest_run.status == "processed"
    assert (view.pages.ocr, view.pages.total) == (len(COUNTS), len(COUNTS))
    assert layout_server(ocr) != first
    asked = Counter(request.sha256 for request in service.ocr.requests)
    assert set(asked.values()) == {1}
    assert len(asked) == sum(COUNTS)
    for page, count in zip(service.pages(document_id), COUNTS, strict=True):
        assert page.markdown.count("What the block says.") == count

    second = layout_server(ocr)
    ocr.kill()
    service.programs.wait_until(lambda: not is_alive(second), "it ends with its worker")
