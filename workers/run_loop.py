"""What both workers do around their own work: claim, guard, end or let go, ring for the next."""

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
from workers.identity import forks, ocr_server, worker_id
from workers.memory_guard import MemoryGuard
from workers.run_guard import RunGuard, Work

log = logging.getLogger(__name__)

_memory = MemoryGuard()


@cache
def event_loop() -> asyncio.Runner:
    """The fork's one event loop; its render child lives on it from document to document."""
    return asyncio.Runner()


def work_on_next(stage: Stage, task_id: str, work: Work) -> str:
    """Claim the best run of the stage and work on it; what became of it, for the monitor."""
    if stage is Stage.OCR and not _memory.is_open(get_settings()):
        return "nothing claimed: the machine is short of memory"
    claimant = Claimant(worker_id(stage), task_id, forks())
    try:
        run = leases.claim(stage, claimant, get_settings().lease, server=ocr_server())
    except DatabaseError as error:
        # Never out of a task: not every error of a driver survives the way to the main process.
        log.warning("No run can be claimed: %s", error_summary(error))
        return f"PostgreSQL does not do its part: {error_summary(error)}"
    if run is None:
        return "nothing to claim"
    log.info("%s: run %s of %s, claim %d", stage, run.id, run.filename, run.epoch)
    try:
        event_loop().run(_guarded(run, work))
        outcome = "done"
    except Exception as error:
        outcome = _end_badly(run, error)
    _ring_for_next(stage)
    return f"{run.filename}: {outcome}"


async def _guarded(run: ClaimedRun, work: Work) -> None:
    async with RunGuard(run, get_settings()) as held:
        await work(held)


def _end_badly(run: ClaimedRun, error: Exception) -> str:
    """Fail the run or give it back, by what went wrong; never raises."""
    try:
        return _judge(run, error)
    except LeaseLost:
        return "no longer ours"
    except DatabaseError as away:
        log.exception("Run %s stays held until its lease expires", run.id)
        return f"PostgreSQL does not do its part: {error_summary(away)}"


def _judge(run: ClaimedRun, error: Exception) -> str:
    if isinstance(error, LeaseLost):
        return "no longer ours"
    if isinstance(error, Draining):
        leases.release(run)
        return "given back: the worker is shutting down"
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
    """The server is out: nobody's fault, the run waits without charge."""
    log.warning("The OCR server is out, run %s waits: %s", run.id, error.message)
    server = ocr_server()
    if server is not None:
        server_state.mark_out(
            server, error.message, misconfigured=isinstance(error, OcrMisconfigured)
        )
    leases.release(run)
    return "waits for the OCR server"


def _ring_for_next(stage: Stage) -> None:
    try:
        waiting = runs.next_claimable(stage, ocr_server(), 1)
    except DatabaseError:
        # Maintenance rings as soon as PostgreSQL is back.
        return
    for target in waiting:
        wake_ups.notify(stage, target.run_id, target.filename)
