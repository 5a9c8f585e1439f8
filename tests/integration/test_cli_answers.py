"""What the commands print about wrong input, with an API in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rag_service.documents import bulk_reprocess
from rag_service.errors import RagServiceError
from rag_service.jobs import runs
from rag_service.knowledgebase import reprocess_jobs
from rag_service.states import PageState, RunState, Stage
from tests import simulation as sim
from tests.conftest import Api

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli(api: Api) -> Cli:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rag_service.cli.main", *map(str, arguments)],
            env=os.environ | {"RAG_SERVICE_URL": api.url},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200,
        )  # fmt: skip

    return run


def test_ingest_reports_what_it_did_not_send(
    cli: Cli, make_pdf: Callable[..., bytes], tmp_path: Path
) -> None:
    (tmp_path / "two\nlines.pdf").write_bytes(make_pdf("a"))
    (tmp_path / "notes.txt").write_text("not sent")
    assert cli("ingest", tmp_path).returncode == 0
    os.mkfifo(tmp_path / "pipe.pdf")
    done = cli("ingest", tmp_path)
    assert done.returncode == 1
    assert "1 file skipped" in done.stderr
    assert "notes.txt" in done.stderr
    head, *rows = (line.split("\t") for line in done.stdout.splitlines())
    found = {Path(row[0]).name: dict(zip(head, row, strict=True)) for row in rows}
    assert set(found) == {"pipe.pdf", "two lines.pdf"}
    assert found["pipe.pdf"]["error"] == "unreadable: This is not a regular file."
    assert found["two lines.pdf"]["duplicate"] == "yes"


@pytest.mark.parametrize("name", [None, "scans/letter.pdf"])
def test_ingest_reads_a_document_from_stdin(
    api: Api, make_pdf: Callable[..., bytes], name: str | None
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rag_service.cli.main", "ingest", "-", "--json"]
        + (["--name", name] if name else []),
        env=os.environ | {"RAG_SERVICE_URL": api.url},
        input=make_pdf("a"), capture_output=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    sent = json.loads(done.stdout)
    assert sent["file"] == "-"
    assert api.get(sent["id"])["filename"] == (name or "stdin").rpartition("/")[2]


def test_ingest_of_an_empty_stdin_is_refused(cli: Cli) -> None:
    done = cli("ingest", "-")
    assert done.returncode == 1
    assert "empty_file" in done.stdout


def test_a_mistyped_error_code_is_refused_with_a_suggestion(cli: Cli) -> None:
    for command in ("reprocess", "status"):
        done = cli(command, "--error", "encryptd_pdf")
        assert (done.returncode, done.stdout) == (2, "")
        assert "Did you mean encrypted_pdf" in done.stderr


def test_reprocess_reports_unknown_ids_and_applies_selectors_to_known_ones(
    cli: Cli, api: Api, make_pdf: Callable[..., bytes], work_off: Callable[..., RunState]
) -> None:
    good = api.add(make_pdf("a"))
    work_off("a")
    bad = api.add(make_pdf("b"))
    work_off(error=RagServiceError("made up"))
    unknown = cli("reprocess", good, "nope")
    assert unknown.returncode == 1
    assert "nope" in unknown.stderr
    assert good not in unknown.stderr
    narrowed = cli("reprocess", good, bad, "--failed", "--all-pages")
    assert narrowed.stdout.splitlines()[-1] == "1 queued."
    assert bad in narrowed.stdout
    assert api.get(good)["status"] == "processed"


def test_reprocess_reads_given_pages_again_and_a_dry_run_reports_it(
    cli: Cli, api: Api, make_pdf: Callable[..., bytes], work_off: Callable[..., RunState]
) -> None:
    document_id = api.add(make_pdf("a", "b", "c"))
    work_off("a", "b", "c")
    nothing = cli("reprocess", document_id, "--pages", "8")
    assert nothing.stdout.splitlines()[-1] == "1 has no such page."
    for options in (["--before", "2020-01-01"], ["--model-was", "old"], ["--truncated"]):
        assert (
            cli("reprocess", document_id, "--pages", "2", *options).stdout == "Nothing to redo.\n"
        )
    options = ["--pages", "1,3", "--since", "2020-01-01 10:30", "--parser-was", "glmocr"]
    options += ["--json"]
    would = json.loads(cli("reprocess", *options, "--dry-run").stdout)
    assert (would["action"], would["pages_reused"], would["pages_redone"]) == ("would_queue", 1, 2)
    done = json.loads(cli("reprocess", *options).stdout)
    assert (done["id"], done["action"], done["pages_redone"]) == (document_id, "queued", 2)


def test_a_reprocess_job_is_started_followed_and_cancelled(
    cli: Cli, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_reprocess, "AT_ONCE", 2)
    for _ in range(3):
        sim.processed_document(PageState.FAILED)
    left = cli("reprocess", "--failed", "--no-wait")
    assert (left.returncode, "running, 0 of 3 documents" in left.stdout) == (0, True), left.stderr
    [job] = api.client.get("/reprocess-jobs").json()["jobs"]
    assert f"rag-service reprocess-jobs {job['id']} --cancel" in left.stdout
    assert f"Reprocess job {job['id']}: running" in cli("status").stdout
    stopped = cli("reprocess-jobs", job["id"][:8], "--cancel")
    assert (stopped.returncode, "cancelled" in stopped.stdout) == (0, True), stopped.stderr
    with ThreadPoolExecutor(1) as pool:
        followed = pool.submit(cli, "reprocess", "--failed")
        while not reprocess_jobs.running():
            assert not followed.done(), followed.result().stderr
            time.sleep(0.05)
        bulk_reprocess.advance(api.settings, threading.Event())
    assert followed.result().returncode == 0
    shown = "done, 3 of 3 documents (3 queued); of its runs 3 in progress"
    assert shown in followed.result().stdout
    assert cli("reprocess-jobs", "--wait").returncode == 2
    assert "No reprocess job nope" in cli("reprocess-jobs", "nope").stderr


def test_reprocess_refuses_selectors_without_meaning(cli: Cli, tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret")
    for wrong, message in {
        ("--pages", "3"): "No documents selected",
        ("--failed", "--pages", "9-3"): "9-3",
        ("--failed", "--pages", "1", "--all-pages"): "all_pages",
        ("--since", "yesterday"): "yesterday",
        ("--since", "2026-03-02", "--before", "2026-03-01"): "since",
        ("--dpi-was", "0"): "dpi-was",
        ("id", "--pages", "1", "--password-file", str(password)): "no pages",
    }.items():
        done = cli("reprocess", *wrong)
        assert (done.returncode, done.stdout) == (2, ""), wrong
        assert message in done.stderr, wrong


def test_show_prints_the_regions_of_one_page(cli: Cli) -> None:
    run = sim.ready_run()
    claimed = sim.claim(Stage.OCR)
    region = {"index": 0, "label": "text", "bbox_2d": [1, 2, 3, 4], "content": "Some text."}
    sim.read(claimed, 1, regions=[region])
    runs.finish(claimed)
    one = cli("show", run.document_id, "--page", "1", "--format", "json")
    assert json.loads(one.stdout)["regions"] == [region]
    whole = cli("show", run.document_id, "--format", "json")
    assert "regions" not in json.loads(whole.stdout)["pages"][0]
