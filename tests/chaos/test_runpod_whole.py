"""End to end with real parts: HTTP, Celery, RunPod's worker loop, the handler, a CPU engine."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path

import httpx
import pymupdf
import pytest
from PIL import Image, ImageDraw, ImageFont

from tests.fakes.runpod_service import RunPodService
from tests.fakes.runpod_workers import RunPodWorkers
from tests.service import Service, open_service
from tests.serving import start_api, start_cpu_server

PAGES, WORKERS = 155, 3
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "runpod_whole.json"
WORDS = ("harbour", "lantern", "meadow", "pigment", "quarry", "saddle", "timber", "window")


def _page(number: int) -> bytes:
    """A scanned page with its own number and some words as text."""
    picture = Image.new("L", (620, 877), 255)
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(30)
    pen.text((60, 90), f"This is page {number} of the scan.", 0, font=font)
    pen.text((60, 150), f"{WORDS[number % 8]} and {WORDS[number // 8 % 8]}", 0, font=font)
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=85)
    return out.getvalue()


@pytest.fixture(scope="module")
def long_scan() -> bytes:
    document = pymupdf.open()
    for number in range(1, PAGES + 1):
        page = document.new_page(width=595, height=842)
        page.insert_image(page.rect, stream=_page(number))
    return document.tobytes()


@pytest.mark.timeout(900)
def test_a_long_scan_is_read_by_several_workers(
    stack: dict[str, str], tmp_path: Path, long_scan: bytes
) -> None:
    with RunPodService() as runpod:
        variables = {
            "RAG_SERVICE_OCR_TRANSPORT": "runpod",
            "RUNPOD_API_BASE": runpod.base_url,
            "RUNPOD_ENDPOINT_ID": runpod.endpoint,
            "RUNPOD_API_KEY": runpod.key,
            "RAG_SERVICE_RUNPOD_WORKERS": str(WORKERS),
            "RAG_SERVICE_OCR_DPI": "75",
            "GLMOCR_MODEL": "pp-ocrv6-tiny",
        }
        with open_service(stack, tmp_path, **variables) as service:
            _ingest(service, runpod, tmp_path, long_scan)


def _ingest(service: Service, runpod: RunPodService, folder: Path, content: bytes) -> None:
    programs = service.programs
    volume = folder / "volume"
    volume.mkdir()
    ocr_url = start_cpu_server(programs)
    workers = RunPodWorkers(runpod, programs, ocr_url=ocr_url, volume=volume)
    workers.start(WORKERS)
    workers.wait_ready()
    programs.wait_ready(programs.start_worker("prepare", 1), programs.start_worker("ocr", 2))
    programs.start_maintenance()
    api = start_api(programs)

    sent = httpx.post(f"{api}/documents", files={"file": ("long.pdf", content)}, timeout=60)
    assert sent.status_code == 202, sent.text
    document_id = sent.json()["id"]
    service.wait_for(document_id, seconds=800)

    document = httpx.get(f"{api}/documents/{document_id}").json()
    assert document["status"] == "processed", document
    markdown = httpx.get(f"{api}/documents/{document_id}/markdown").text
    found = [n for n in range(1, PAGES + 1) if f"page {n} of" in markdown]
    assert len(found) >= 0.97 * PAGES, sorted(set(range(1, PAGES + 1)) - set(found))
    _check_posts(service, runpod, document)


def _check_posts(service: Service, runpod: RunPodService, document: dict) -> None:
    rows = service.rows("SELECT reason, outcome, pages, execution_ms FROM remote_jobs")
    assert Counter(row.reason for row in rows) == {"first": len(rows)}
    assert sorted(page for row in rows for page in row.pages) == list(range(1, PAGES + 1))
    assert sum(runpod.posts.values()) == len(rows)
    used = {worker for job in runpod.jobs for worker in job.takes}
    assert len(used) == WORKERS
    RESULTS.write_text(
        json.dumps(
            {
                "pages": PAGES,
                "jobs": len(rows),
                "posts": sum(runpod.posts.values()),
                "workers": len(used),
                "run_seconds": document["run_seconds"],
                "cost": document["cost"],
            },
            indent=2,
        )
        + "\n"
    )
