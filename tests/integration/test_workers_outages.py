"""What a misbehaving OCR server does to documents: parked, retried, failed by name, never lost."""

import pytest
from tests.fakes.scans import Mark, new_number, scan
from tests.service import open_service


@pytest.fixture(scope="module")
def service(stack, tmp_path_factory):
    with open_service(stack, tmp_path_factory.mktemp("outages")) as service:
        programs = service.programs
        programs.start_maintenance()
        programs.wait_ready(programs.start_worker("prepare", 2), programs.start_worker("ocr", 4))
        yield service


@pytest.fixture(autouse=True)
def _healthy(service):
    service.ocr.reset()
    yield
    assert service.ocr.doubled == []


def test_a_scan_is_read_page_by_page(service):
    number = new_number()
    view = service.wait_for(service.add(scan(number, 3)))
    assert (view.status, view.pages.ocr) == ("processed", 3)
    for page in service.pages(view.id):
        assert page.markdown == Mark(number, page.number).text
        assert len(service.ocr.of(Mark(number, page.number))) == 1
