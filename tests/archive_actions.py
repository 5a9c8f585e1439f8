"""Everything that the service often asks of its database, as actions on a filled archive."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import product
from typing import Any

from sqlalchemy import text

from rag_service.config.loader import get_settings
from rag_service.database import document_rows, store_rows, totals
from rag_service.database.document_rows import NewDocument
from rag_service.database.engine import begin
from rag_service.documents import deletion
from rag_service.errors import Cancelled, OcrFailed
from rag_service.jobs import (
    fork_loads,
    leases,
    limit_changes,
    live_workers,
    remote_endpoints,
    remote_jobs,
    remote_posts,
    run_pages,
    runs,
    server_outages,
    server_samples,
    server_state,
)
from rag_service.jobs.leases import Claimant, ClaimedRun
from rag_service.knowledgebase import document_queries, job_queries, page_queries
from rag_service.knowledgebase.document_queries import Filter
from rag_service.knowledgebase.selection import Selectors, select_documents
from rag_service.knowledgebase.summary_queries import summarise
from rag_service.monitoring import readiness
from rag_service.states import Priority, RunState, Stage
from tests.simulation import OPTIONS, read

URL = "http://127.0.0.1:5002"
BASE, ENDPOINT = "https://api.runpod.ai/v2", "endpoint"
# The group, the name, and the action itself.
Case = tuple[str, str, Callable[[], object]]


@dataclass(frozen=True)
class Known:
    """Documents of the archive that actions are about."""

    processed: str
    queued_first: str
    queued_last: str
    token: str
    run: str


def _known() -> Known:
    with begin() as connection:

        def one(query: str) -> Any:
            return connection.execute(text(query)).scalar_one()

        queue = "SELECT document_id FROM runs WHERE state = 'queued' ORDER BY priority {0}, "
        queue += "created_at {0}, id {0} LIMIT 1"
        return Known(
            processed=one("SELECT id FROM documents WHERE status = 'processed' LIMIT 1"),
            queued_first=one(queue.format("ASC")),
            queued_last=one(queue.format("DESC")),
            token=one("SELECT token_sha256 FROM remote_jobs WHERE state = 'live' LIMIT 1"),
            run=one("SELECT run_id FROM remote_jobs WHERE state = 'ended' LIMIT 1"),
        )


def all_cases() -> Iterator[Case]:
    """Yield the cases, in an order in which each can take effect after those before it."""
    known = _known()
    yield from _worker_cases()
    yield from _maintenance_cases()
    yield from _monitoring_cases()
    yield from _intake_cases(known)
    yield from _view_cases(known)
    yield from _list_cases()
    yield from _selection_cases()


def _claim(stage: Stage) -> ClaimedRun:
    claimant = Claimant("benchmark", f"{stage}:{time.monotonic_ns()}", 100)
    run = leases.claim(stage, claimant, get_settings().lease, server=URL)
    assert run is not None
    return run


def _worker_cases() -> Iterator[Case]:
    lease = get_settings().lease
    held = {stage: _claim(stage) for stage in Stage}
    ocr, prepare = held[Stage.OCR], held[Stage.PREPARE]
    for stage in Stage:
        yield "worker", f"claim, {stage}", partial(_claim, stage)
    yield "worker", "renew a lease", lambda: leases.renew(ocr, lease)
    yield "worker", "pending pages", lambda: run_pages.pending(ocr)
    yield "worker", "seconds until due", lambda: run_pages.seconds_until_due(ocr)
    yield "worker", "reuse pages", lambda: run_pages.reuse(ocr)
    yield "worker", "begin a page", lambda: run_pages.mark_in_progress(ocr, 2)
    yield "worker", "store a page", lambda: read(ocr, 2)
    yield "worker", "free pages", lambda: remote_posts.free_pages(ocr)
    yield "worker", "interrupted posts", lambda: remote_posts.note_interrupted(ocr)
    yield "worker", "is at work", lambda: leases.is_at_work("none")
    yield "worker", "lost child", lambda: leases.release_crashed("none", "none", lease)
    yield "worker", "stop", lambda: leases.release_worker("none")
    yield "worker", "load of all forks", lambda: fork_loads.total(URL)
    yield "worker", "hand to ocr", lambda: runs.hand_to_ocr(prepare)
    yield "worker", "end a run", lambda: runs.fail(ocr, OcrFailed())
    yield "worker", "jobs of a run", lambda: remote_jobs.jobs_of(ocr.id)


def _maintenance_cases() -> Iterator[Case]:
    yield "maintenance", "expired leases", lambda: leases.release_expired(get_settings().lease)
    for stage in Stage:
        yield "maintenance", f"live workers, {stage}", partial(live_workers.of_stage, stage)
        yield (
            "maintenance", f"claimable runs, {stage}",
            partial(live_workers.claimable_counts, stage, URL, 16),
        )  # fmt: skip
        yield "maintenance", f"wake-ups, {stage}", partial(runs.next_claimable, stage, URL, 16)
    yield "maintenance", "server", lambda: server_state.get(URL)
    yield "maintenance", "stale trial", lambda: server_state.end_stale_trial(URL)
    yield (
        "maintenance", "long parked runs",
        lambda: server_state.fail_long_parked(URL, 3600, OcrFailed()),
    )  # fmt: skip
    yield "maintenance", "begin a trial", lambda: server_state.begin_trial(URL)
    yield "maintenance", "due jobs", lambda: remote_jobs.claim_due(16)
    yield "maintenance", "abandoned posts", remote_posts.note_abandoned
    yield "maintenance", "lost posts", lambda: remote_posts.wake_for_reposts(60)
    yield (
        "maintenance", "live jobs",
        lambda: remote_endpoints.live_jobs(BASE, ENDPOINT, long=600),
    )  # fmt: skip
    yield "maintenance", "deleted documents", lambda: document_rows.removable_documents(100)
    yield "maintenance", "totals", totals.add_changes
    yield "maintenance", "report of an outage", lambda: server_outages.next_report(URL)
    yield "maintenance", "files of the store", store_rows.some_source_keys


def _monitoring_cases() -> Iterator[Case]:
    yield "sampler", "pages waiting and rate", server_samples.page_queue
    yield (
        "sampler", "gauges of jobs", lambda: server_samples.endpoint_gauges(BASE, ENDPOINT, 300)
    )  # fmt: skip
    yield "sampler", "samples", lambda: server_samples.samples(URL, 600)
    yield "sampler", "most running", lambda: server_samples.most_running(URL)
    yield "health", "database", readiness.database_faults
    yield "health", "processing", lambda: readiness.processing_faults(get_settings())
    yield "metrics", "totals", totals.read_totals
    yield "metrics", "servers", lambda: server_samples.latest(60, URL)
    yield "metrics", "changes of limits", limit_changes.last_changes
    yield "status", "summary", lambda: summarise(get_settings())


def _intake_cases(known: Known) -> Iterator[Case]:
    def backlog() -> None:
        with begin() as connection:
            runs.backlog(connection, 10_000, Priority.BULK)

    def find(sha256: str) -> None:
        with begin() as connection:
            document_rows.find_by_content(connection, "default", sha256)

    def add() -> None:
        new = NewDocument("default", f"{time.monotonic_ns():064x}", "a.pdf", "application/pdf", 9)
        with begin() as connection:
            document_id = document_rows.insert_document(connection, new, "key")
            runs.add_run(connection, document_id, OPTIONS, Priority.BULK)

    def add_again() -> None:
        with begin() as connection:
            runs.add_run(connection, known.processed, OPTIONS, Priority.BULK)

    def cancel() -> None:
        with begin() as connection:
            runs.cancel(connection, known.processed, Cancelled())

    yield "intake", "backlog", backlog
    yield "intake", "duplicate, none", lambda: find("none")
    yield "intake", "duplicate, found", lambda: find(known.processed * 2)
    yield "intake", "add a document", add
    yield "reprocess", "add a run", add_again
    yield "cancel", "a run", cancel
    yield "delete", "a document", lambda: deletion.delete(known.queued_first)
    yield "webhook", "token", lambda: remote_jobs.has_token(known.token)
    yield "webhook", "unknown token", lambda: remote_jobs.has_token("none")
    yield "webhook", "hint", lambda: remote_jobs.hint(known.token, "job")


def _view_cases(known: Known) -> Iterator[Case]:
    yield "show", "processed", lambda: document_queries.get_document(known.processed, URL)
    yield "show", "last in the queue", lambda: document_queries.get_document(known.queued_last, URL)
    ids = [known.processed, known.queued_first, known.queued_last]
    yield "show", "followed documents", lambda: document_queries.get_documents(ids, URL)
    yield "show", "unknown", lambda: document_queries.get_document("none", URL)
    yield "show", "source", lambda: document_queries.get_source(known.processed)
    yield "show", "pages", lambda: page_queries.list_pages(known.run)
    yield "show", "jobs", lambda: job_queries.list_jobs(known.processed)


def _list_cases() -> Iterator[Case]:
    """Every combination of the filters, with values that match many documents, few or none."""
    statuses = (None, RunState.PROCESSED, RunState.FAILED, RunState.PREPARING, RunState.FINISHING)
    collections = (None, "default", "rare", "none")
    errors = (None, "corrupt_pdf", "ocr_unavailable", "page_too_large")
    for status, collection, error in product(statuses, collections, errors):
        chosen = Filter(status, collection, error)
        name = ", ".join(str(word) for word in (status, collection, error) if word) or "all"
        yield "list", name, partial(document_queries.list_documents, chosen, 51, URL)
    of_pages = Filter(error="page_timeout")
    yield "list", "error of pages", partial(document_queries.list_documents, of_pages, 51, URL)
    middle = (datetime.now(UTC) - timedelta(hours=2), "f" * 32)
    for status in (None, RunState.PROCESSED, RunState.FAILED):
        chosen = Filter(status, after=middle)
        yield (
            "list", f"{status or 'all'} after a cursor",
            partial(document_queries.list_documents, chosen, 51, URL),
        )  # fmt: skip
    prefix = Filter(id_prefix="0b1f5e")
    yield "list", "ID prefix", partial(document_queries.list_documents, prefix, 51, URL)


def _selection_cases() -> Iterator[Case]:
    """Selectors; what they cost grows with what they select, and with nothing else."""
    now = datetime.now(UTC)
    selectors = {
        "--failed --collection none": Selectors(failed=True, collection="none"),
        "--error, none": Selectors(error="page_too_large"),
        "--error of pages, --collection none": Selectors(error="page_timeout", collection="none"),
        "--since the last second": Selectors(since=now),
        "--before a year ago": Selectors(before=now - timedelta(days=3650)),
        "--parser-was, none": Selectors(parser_was="other"),
        "--collection, none": Selectors(collection="none"),
        "--collection rare": Selectors(collection="rare"),
        "--failed": Selectors(failed=True),
        "--error": Selectors(error="corrupt_pdf"),
        "--error of pages": Selectors(error="page_timeout"),
        "--truncated": Selectors(truncated=True),
        "--since the last hour": Selectors(since=now - timedelta(hours=1)),
        "--model-was, none": Selectors(model_was="other"),
    }

    def select(chosen: Selectors) -> None:
        with begin() as connection:
            select_documents(connection, chosen)

    for name, chosen in selectors.items():
        yield "reprocess", name, partial(select, chosen)
