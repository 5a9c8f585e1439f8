"""A document's jobs on RunPod, over HTTP and as the command line prints them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from rag_service.jobs import remote_jobs
from rag_service.jobs.remote_jobs import PollNote
from rag_service.states import PostReason
from tests.conftest import Api
from tests.posts import again, held_run, live_job, read_page, settle

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli(api: Api) -> Cli:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rag_service.cli.main", *map(str, arguments)],
            env=os.environ | {"RAG_SERVICE_URL": api.url},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    return run


def posted() -> Any:
    """A run with one job that has ended, one that failed, and its live repost."""
    run = held_run(4)
    settle(live_job(run, 1, 2), read_page(1), read_page(2), execution_ms=3000, delay_ms=70,
           last_status="COMPLETED")  # fmt: skip
    reasons = {3: PostReason.SECOND_TRY, 4: PostReason.SECOND_TRY}
    settle(live_job(run, 3, 4), again(3), again(4), reasons=reasons, error_message="out of memory")
    job = live_job(run, 3, 4, reason=PostReason.SECOND_TRY)
    remote_jobs.note_poll(job.id, PollNote(next_in=9, status="IN_QUEUE", error=""))
    return run


def test_jobs_are_answered_oldest_first(api: Api) -> None:
    run = posted()
    answer = api.client.get(f"/documents/{run.document_id}/jobs")
    first, second, third = answer.json()["jobs"]
    assert (first["pages"], first["outcome"], first["usd"]) == ([1, 2], "completed", 1.5)
    assert (second["error"], second["outcome"]) == ("out of memory", "completed")
    assert (third["reason"], third["state"]) == ("second_try", "live")
    assert (third["last_status"], third["polls"]) == ("IN_QUEUE", 1)
    assert third["age_seconds"] >= 0
    for job in (first, second, third):
        assert job["remote_id"].startswith("remote-")


@pytest.mark.parametrize(
    ("path", "status"),
    [(f"/documents/{'0' * 32}/jobs", 404), ("/documents/../jobs", 404)],
)
def test_jobs_of_an_unknown_document_are_not_found(api: Api, path: str, status: int) -> None:
    assert api.client.get(path).status_code == status


def test_a_document_that_is_not_sent_to_runpod_has_no_jobs(
    api: Api, cli: Cli, make_pdf: Callable[..., bytes]
) -> None:
    document_id = api.add(make_pdf("a"))
    assert api.client.get(f"/documents/{document_id}/jobs").json() == {"jobs": []}
    answer = api.client.get(f"/documents/{document_id}/jobs", params={"status": "live"})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_options")
    done = cli("show", document_id, "--jobs")
    assert (done.returncode, done.stdout) == (0, "")
    assert "No page of this document was posted" in done.stderr


def test_show_prints_jobs_as_a_table_and_as_json(cli: Cli) -> None:
    run = posted()
    done = cli("show", run.document_id, "--jobs")
    assert done.returncode == 0, done.stderr
    head, *lines = (line.split("\t") for line in done.stdout.splitlines())
    first, second, third = (dict(zip(head, line, strict=True)) for line in lines)
    assert (first["pages"], first["delay ms"], first["execution ms"]) == ("1-2", "70", "3000")
    assert (first["usd at least"], first["status"]) == ("1.5000", "COMPLETED")
    assert (second["error"], second["usd at least"]) == ("out of memory", "")
    assert (third["reason"], third["status"], third["polls"]) == ("second_try", "IN_QUEUE", "1")
    shown = [json.loads(line) for line in cli("show", run.document_id, "--jobs", "--json")
            .stdout.splitlines()]  # fmt: skip
    assert [job["pages"] for job in shown] == [[1, 2], [3, 4], [3, 4]]


def test_show_jobs_fails_for_an_unknown_document_and_for_a_page(cli: Cli) -> None:
    assert cli("show", "0" * 32, "--jobs").returncode == 1
    assert cli("show", "0" * 32, "--jobs", "--page", "1").returncode == 2


def test_show_prints_the_cost_if_there_is_one(cli: Cli) -> None:
    free = held_run(1)
    assert "cost" not in cli("status").stdout.splitlines()[0].split("\t")
    run = posted()
    head, *lines = [line.split("\t") for line in cli("status").stdout.splitlines()[:3]]
    costs = {line[0]: dict(zip(head, line, strict=True))["cost"] for line in lines}
    assert costs == {run.document_id: "at least $1.5000 (3.0 GPU s)", free.document_id: ""}
    assert "at least $1.5000" in cli("show", run.document_id).stdout.splitlines()[0]


def test_a_page_that_was_never_read_is_shown_as_not_read(cli: Cli) -> None:
    run = held_run(1)
    assert "<!-- page 1: pending -->" in cli("show", run.document_id).stdout
    cli("cancel", run.document_id)
    assert "<!-- page 1: not read -->" in cli("show", run.document_id).stdout
    shown = json.loads(cli("show", run.document_id, "--json").stdout)
    assert [page["status"] for page in shown["pages"]] == ["not_read"]
