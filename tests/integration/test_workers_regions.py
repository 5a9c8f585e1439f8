"""Real workers that read by regions, with one layout server that is killed and restarted."""

import os
import signal
from collections import Counter

import psutil
import pytest

from tests.fakes import ocr_server as fake
from tests.fakes.page_pictures import numbered_scan
from tests.service import open_service

PAGES, BLOCKS = 8, 4


@pytest.fixture
def service(stack, tmp_path):
    with open_service(stack, tmp_path, RAG_SERVICE_OCR_LAYOUT="regions") as opened:
        yield opened
        assert opened.ocr.doubled == []


def start(service, forks=2):
    service.programs.start_maintenance()
    prepare = service.programs.start_worker("prepare", 1)
    worker = service.programs.start_worker("ocr", forks)
    service.programs.wait_ready(prepare, worker)
    return worker


def layout_servers(worker):
    children = psutil.Process(worker.pid).children(recursive=True)
    return [child for child in children if "layout_server" in " ".join(child.cmdline())]


def require_each_region_read_once(service, document_id):
    pages = service.pages(document_id)
    assert [page.status for page in pages] == ["ocr"] * PAGES
    asked = Counter(request.sha256 for request in service.ocr.requests)
    assert len(asked) == PAGES * BLOCKS
    assert set(asked.values()) == {1}


def test_a_scan_is_read_by_its_regions_with_one_layout_server_for_all_forks(service):
    service.ocr.default = fake.Reply(text="Some words of it.")
    worker = start(service)
    ids = [service.add(numbered_scan(PAGES), "pages.pdf")]
    for document_id in ids:
        assert service.wait_for(document_id).status == "processed"
    require_each_region_read_once(service, ids[0])
    assert len(layout_servers(worker)) == 1


def test_a_killed_layout_server_costs_no_page_and_no_second_request(service):
    service.ocr.default = fake.Reply(text="Some words of it.", delay=0.05)
    worker = start(service)
    document_id = service.add(numbered_scan(PAGES), "pages.pdf")
    service.programs.wait_until(lambda: service.ocr.requests, "the first region is sent")
    (killed,) = layout_servers(worker)
    os.kill(killed.pid, signal.SIGKILL)
    assert service.wait_for(document_id).status == "processed"
    require_each_region_read_once(service, document_id)
    (restarted,) = layout_servers(worker)
    assert restarted.pid != killed.pid


@pytest.mark.parametrize("flaw", [fake.EMPTY, fake.HALF, fake.LOOP])
def test_in_auto_mode_a_flawed_page_is_read_again_by_its_regions(stack, tmp_path, flaw):
    with open_service(stack, tmp_path, RAG_SERVICE_OCR_LAYOUT="auto") as service:
        service.ocr.default = fake.Reply(text="Some words of it.")
        service.ocr.next(flaw)
        start(service, forks=1)
        document_id = service.add(numbered_scan(1), "page.pdf")
        view = service.wait_for(document_id)
        assert (view.status, view.warnings) == ("processed", [])
        assert len(service.ocr.requests) == 1 + BLOCKS
        (page,) = service.pages(document_id)
        assert page.markdown.count("Some words of it.") == BLOCKS
