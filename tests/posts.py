"""Helpers that make and settle posts to RunPod step by step, as workers do it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from rag_service.database.engine import begin
from rag_service.errors import Cancelled
from rag_service.jobs import remote_jobs, remote_posts, runs
from rag_service.jobs.leases import ClaimedRun
from rag_service.jobs.remote_jobs import JobEnd, JobRow
from rag_service.jobs.remote_posts import NewJob
from rag_service.jobs.run_pages import StoredPage
from rag_service.runpod.job_keys import token_digest
from rag_service.states import JobOutcome, PageState, PostReason, Stage
from tests import simulation as sim

BASE, ENDPOINT = "http://runpod/v2", "ep"


def held_run(pages: int = 2) -> ClaimedRun:
    """A run held by an ocr fork, whose pages all wait for a post."""
    sim.ready_run(*[PageState.PENDING] * (pages - 1))
    return sim.claim(Stage.OCR)


def new_job(
    *pages: int,
    reason: PostReason = PostReason.FIRST,
    token: str | None = None,
    endpoint: str = ENDPOINT,
    ttl: float = 3600.0,
) -> NewJob:
    return NewJob(
        base_url=BASE,
        endpoint_id=endpoint,
        request_key=f"key of {pages}",
        token_sha256=token_digest(token or uuid.uuid4().hex),
        pages=pages,
        reason=reason,
        ttl=ttl,
        usd_per_second=0.5,
    )


def open_job(run: ClaimedRun, *pages: int, max_live: int = 64, **more: Any) -> Any:
    """Return the new post's id, or None at the limit."""
    return remote_posts.open_job(run, new_job(*pages, **more), max_live=max_live)


def live_job(run: ClaimedRun, *pages: int, **more: Any) -> JobRow:
    """Return the row of a post that returned its id, as pollers get it."""
    job_id = open_job(run, *pages, **more)
    remote_posts.store_remote_id(job_id, f"remote-{job_id}")
    return job_row(run, job_id)


def job_row(run: ClaimedRun, job_id: str) -> JobRow:
    return next(job for job in remote_jobs.jobs_of(run.id) if job.id == job_id)


def row(job_id: str) -> Any:
    return sim.one("SELECT * FROM remote_jobs WHERE id = :id", id=job_id)


def read_page(number: int) -> StoredPage:
    return StoredPage(number, PageState.OCR, f"text of {number}", {})


def again(number: int) -> StoredPage:
    return StoredPage(number, PageState.FAILED, "", {}, retry_in=0.0)


def settle(
    job: JobRow,
    *pages: StoredPage,
    outcome: JobOutcome = JobOutcome.COMPLETED,
    reasons: Mapping[int, PostReason] | None = None,
    **columns: Any,
) -> bool:
    return remote_jobs.settle(job, JobEnd(outcome, pages, reasons or {}, columns))


def claims(run: ClaimedRun) -> list[str | None]:
    """Return the job that claims each of the run's pages."""
    query = "SELECT remote_job_id FROM pages WHERE run_id = :id ORDER BY number"
    return [page.remote_job_id for page in sim.rows(query, id=run.id)]


def cancel(run: ClaimedRun) -> bool:
    with begin() as connection:
        return runs.cancel(connection, run.document_id, Cancelled())
