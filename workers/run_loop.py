"""The steps around the work of both workers: claim a run, guard it, then end or release it.

Afterwards a wake-up message is sent for the next run.
"""

from __future__ import annotations

import asyncio
import logging
from functools import cache

from rag_service.config.loader import get_settings
from rag_service.database.engine import DatabaseError, error_summary, is_outage
from rag_service.errors import (
    DocumentError,
    Draining,
    Internal,
    LeaseLost,
    OcrMisconfigured,
    OcrOutage,
    RagServiceError,
)
from rag_service.jobs import leases, runs, server_state, wake_ups
from rag_service.jobs.leases import Claimant, ClaimedRun
from rag_service.states import Stage
from workers.memory_guard import MemoryGuard
from workers.run_guard import RunGuard, Work
from workers.worker_state import fork_count, ocr_server, worker_id

log = logging.getLogger(__name__)

_memory_guard = MemoryGuard()


@cache
def event_loop() -> asyncio.Runner:
    """Return the fork's one event loop; its render child stays on it from document to document."""
    return asyncio.Runner()


def work_on_next(stage: Stage, task_id: str, work: Work) -> str:
    """Claim the best run of the stage and work on it. Return the outcome as Flower shows it."""
    if stage is Stage.OCR and not _memory_guard.allows_claim(get_settings()):
        return "no run claimed: this machine is short of memory"
    claimant = Claimant(worker_id(stage), task_id, fork_count())
    try:
        run = leases.claim(stage, claimant, get_settings().lease, server=ocr_server())
    except DatabaseError as error:
        # Not raised: some driver errors cannot be pickled for the main process.
        log.warning("Cannot claim a run: %s", error_summary(error))
        return f"PostgreSQL error: {error_summary(error)}"
    if run is None:
        return "no run to claim"
    log.info("%s: run %s of %s, claim %d", stage, run.id, run.filename, run.epoch)
    try:
        event_loop().run(_run_guarded(run, work))
        outcome = "done"
    except Exception as error:
        outcome = _handle_error(run, error)
    _notify_next(stage)
    return f"{run.filename}: {outcome}"


async def _run_guarded(run: ClaimedRun, work: Work) -> None:
    async with RunGuard(run, get_settings()) as guard:
        await work(guard)


def _handle_error(run: ClaimedRun, error: Exception) -> str:
    """Fail or release the run, depending on the error. Never raises."""
    try:
        return _fail_or_release(run, error)
    except LeaseLost:
        return "the lease was lost"
    except DatabaseError as outage:
        log.exception("Run %s stays claimed until its lease expires", run.id)
        return f"PostgreSQL error: {error_summary(outage)}"


def _fail_or_release(run: ClaimedRun, error: Exception) -> str:
    if isinstance(error, LeaseLost):
        return "the lease was lost"
    if isinstance(error, Draining):
        leases.release(run)
        return "released: the worker is shutting down"
    if isinstance(error, OcrOutage):
        return _park(run, error)
    if isinstance(error, DatabaseError) and is_outage(error):
        raise error
    if not isinstance(error, DocumentError):
        log.error("Run %s of %s failed", run.id, run.filename, exc_info=error)
        error = Internal(f"{Internal().message} ({type(error).__name__}: {error})")
    runs.fail(run, error)
    return f"failed: {error.code}"


def _park(run: ClaimedRun, error: RagServiceError) -> str:
    """Release the run until the OCR server works again; the outage is not charged to it."""
    log.warning("The OCR server is out, run %s waits: %s", run.id, error.message)
    server = ocr_server()
    if server is not None:
        server_state.mark_out(
            server, error.message, misconfigured=isinstance(error, OcrMisconfigured)
        )
    leases.release(run)
    return "waits for the OCR server"


def _notify_next(stage: Stage) -> None:
    try:
        waiting = runs.next_claimable(stage, ocr_server(), 1)
    except DatabaseError:
        # Maintenance sends the message when PostgreSQL is back.
        return
    for target in waiting:
        wake_ups.notify(stage, target.run_id, target.filename)
