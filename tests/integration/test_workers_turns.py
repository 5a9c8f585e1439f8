"""A document that takes the time of the prepare worker lets others go first, and still ends."""

from __future__ import annotations

import pytest

from tests.fakes.nested_pages import nested
from tests.fakes.pdf_samples import joined, prose_page
from tests.service import open_service


@pytest.fixture(scope="module")
def service(stack, tmp_path_factory):
    """The service with one fork that prepares, and short turns."""
    short = {"RAG_SERVICE_PDF_PAGE_TIME_LIMIT": "3", "RAG_SERVICE_WORKER_TURN": "1"}
    with open_service(stack, tmp_path_factory.mktemp("turns"), **short) as service:
        service.programs.start_maintenance()
        service.worker = service.programs.start_worker("prepare", 1)
        service.programs.wait_ready(service.worker)
        yield service


def test_a_document_that_takes_long_gives_its_fork_to_those_that_wait(service, tmp_path):
    slow = service.add(nested("text", 40, good=(1,)), "nested.pdf")
    service.wait_for(slow, "preparing")
    ordinary = joined(tmp_path / "ordinary.pdf", *[prose_page()] * 3).read_bytes()
    others = [service.add(ordinary + b"\n%%%d" % number, f"{number}.pdf") for number in range(3)]
    for other in others:
        service.wait_for(other, "processed")
    assert service.view(slow).status in {"queued", "preparing"}
    assert "gives way" in service.worker.text
    view = service.wait_for(slow, "failed")
    assert view.error.code == "pages_failed"
    assert (view.pages.failed, view.pages.native) == (39, 1)
    run = service.run(slow)
    assert (run.crashes, run.expiries) == (0, 0)
    last = service.page(slow, 40)
    assert last.error.code == "page_timeout"
    assert "not tried" in last.error.message
