"""Slow tests on RunPod: jobs far longer than the poll window, scans far larger than a job."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.fakes.heavy_scans import scan
from tests.fakes.runpod_service import read_all
from tests.remote import open_remote
from tests.serving import start_api

WINDOW, EXECUTION = 10, 55
HEAVY_PAGES, HEAVY_BYTES = 8, 39_000_000


@pytest.mark.timeout(300)
def test_a_job_outlives_its_windows_and_three_workers(
    stack: dict[str, str], tmp_path: Path
) -> None:
    variables = {
        "RAG_SERVICE_RUNPOD_POLL_WINDOW": str(WINDOW),
        "RAG_SERVICE_RUNPOD_POLL_MAX": "2",
    }
    with open_remote(stack, tmp_path, **variables) as remote:
        remote.runpod.play(read_all, workers=3, seconds=EXECUTION)
        worker = remote.start()
        document_id = remote.add(24)
        remote.live(document_id, 3)
        for _ in range(3):
            remote.wait(
                lambda: remote.view(document_id).waiting_for == "remote_job", "the window is over"
            )
            worker.kill()
            worker = remote.programs.start_worker("ocr", 3)
            remote.programs.wait_ready(worker)
        view = remote.ended(document_id, seconds=200)
        assert view.status == "processed"
        assert view.pages.ocr == 24
        rows = remote.rows(document_id)
        assert {(post.reason, post.outcome) for post in rows} == {("first", "completed")}
        assert set(remote.posts(document_id).values()) == {1}
        assert sum(remote.posts(document_id).values()) == len(rows) == 3
        assert all((post.execution_ms or 0) >= EXECUTION * 1000 for post in rows)
        remote.require_one_handler(document_id)


@pytest.mark.timeout(300)
def test_a_heavy_scan_is_processed_without_ghostscript(
    stack: dict[str, str], tmp_path: Path
) -> None:
    content = scan(tmp_path / "heavy.pdf", HEAVY_PAGES, quality=97).read_bytes()
    assert len(content) >= HEAVY_BYTES
    no_programs = tmp_path / "empty-path"
    no_programs.mkdir()
    with open_remote(stack, tmp_path, PATH=str(no_programs)) as remote:
        remote.runpod.play(read_all, workers=3)
        worker = remote.start(ocr=2)
        assert "Ghostscript" in worker.text
        api = start_api(remote.programs)
        degraded = httpx.get(f"{api}/health/ready").json()["degraded"]
        assert "ghostscript" in {fault["name"] for fault in degraded}
        sent = httpx.post(f"{api}/documents", files={"file": ("heavy.pdf", content)}, timeout=60)
        document_id = sent.json()["id"]
        view = remote.ended(document_id, seconds=200)
        assert view.status == "processed"
        assert view.pages.ocr == HEAVY_PAGES
        assert {"shrinker_fallback", "shrunk_150"} <= {warning.code for warning in view.warnings}
        remote.require_reasons(document_id)
