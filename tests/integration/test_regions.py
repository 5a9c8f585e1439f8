"""Regions of pages: from a parser or a job to the rows, and from there to the API."""

import asyncio
import hashlib
from dataclasses import replace

import pytest

from rag_service.config.loader import get_settings
from rag_service.documents.storage import DocumentStore, source_key
from rag_service.jobs import run_pages, runs
from rag_service.knowledgebase import page_queries
from rag_service.parsers.contract import PageResult, Region
from rag_service.states import LayoutMode, PageState, Stage
from tests import simulation as sim
from tests.fakes.runpod_service import read_all
from tests.remote import open_remote
from workers.run_guard import RunGuard

TITLE = {"index": 0, "label": "doc_title", "bbox_2d": [90, 40, 910, 80], "content": "# A title"}
TEXT = {"index": 1, "label": "text", "bbox_2d": [90, 100, 910, 700], "content": "Some text."}


class ByRegions:
    """A parser that finds the same two regions on every page, and records its jobs."""

    name, version = "glmocr", "of a test"

    def __init__(self):
        self.jobs = []

    async def parse(self, job, source, sink, watch):
        self.jobs.append(job)
        for page in job.pages:
            regions = [
                Region(found["index"], found["label"], tuple(found["bbox_2d"]), found["content"])
                for found in (TITLE, TEXT)
            ]
            await sink.store(PageResult(page.number, PageState.OCR, "# A title", regions))


def shown(run):
    page = page_queries.get_page(run.id, 1)
    return [region.model_dump(mode="json") for region in page.regions]


@pytest.fixture
def claimed_run(settings, make_pdf, tmp_path):
    """A run that reads by regions, whatever the settings say, and its document's bytes."""
    path = tmp_path / "a.pdf"
    path.write_bytes(make_pdf("one"))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    DocumentStore(settings).put_file(source_key(sha256), path)
    sim.ready_run(options=replace(sim.OPTIONS, layout=LayoutMode.REGIONS), sha256=sha256)
    return sim.claim(Stage.OCR)


def test_a_worker_uses_the_runs_layout_mode_and_stores_the_regions(
    claimed_run, settings, monkeypatch
):
    # Not above: the module is a worker's, which has a broker from its first line on.
    from workers import ocr_worker

    parser = ByRegions()
    monkeypatch.setattr(ocr_worker, "make_parser", lambda name, settings: parser)

    async def work():
        async with RunGuard(claimed_run, settings, Stage.OCR) as held:
            await ocr_worker.read_run(held)

    assert settings.ocr.layout is not LayoutMode.REGIONS
    asyncio.run(work())
    [job] = parser.jobs
    assert job.layout is LayoutMode.REGIONS
    assert shown(claimed_run) == [TITLE, TEXT]


def test_pages_that_are_taken_over_keep_their_regions(settings):
    first = sim.ready_run()
    held = sim.claim(Stage.OCR)
    sim.read(held, 1, regions=[TITLE, TEXT])
    runs.finish(held)
    sim.add_run(first.document_id)
    assert run_pages.reuse(again := sim.claim()) == 1
    assert shown(again) == [TITLE, TEXT]


def test_one_page_is_shown_with_its_regions_and_a_list_without(api):
    sim.ready_run(PageState.NATIVE)
    run = sim.claim(Stage.OCR)
    sim.read(run, 1, regions=[TITLE, TEXT | {"content": "a\x00b"}])
    url = f"/documents/{run.document_id}/pages"
    assert api.client.get(f"{url}/1").json()["regions"] == [TITLE, TEXT | {"content": "a b"}]
    assert api.client.get(f"{url}/2").json()["regions"] == []
    assert all("regions" not in page for page in api.client.get(url).json()["pages"])


def test_a_job_uses_the_runs_layout_mode_and_returns_the_regions(stack, tmp_path):
    asked = []

    def by_regions(job):
        asked.append(job["options"]["layout"])
        output = read_all(job)
        return output | {"pages": [page | {"regions": [TITLE]} for page in output["pages"]]}

    with open_remote(stack, tmp_path, RAG_SERVICE_OCR_LAYOUT="page") as remote:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAG_SERVICE_OCR_LAYOUT", "regions")
            get_settings.cache_clear()
            document_id = remote.add()
        get_settings.cache_clear()
        remote.runpod.play(by_regions)
        remote.start(ocr=1)
        assert remote.ended(document_id).status == "processed"
        assert asked == ["regions"]
        assert shown(remote.service.run(document_id)) == [TITLE]
