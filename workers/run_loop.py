"""The steps around the work of both workers: claim a run, guard it, then end or release it.

Afterwards a wake-up message is sent for the next run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from functools import cache
from typing import NoReturn

from rag_service.config.loader import get_settings
from rag_service.database.engine import DatabaseError, error_summary, is_outage
from rag_service.errors import (
    DocumentError,
    Draining,
    FlowSignal,
    GaveWay,
    Internal,
    LeaseLost,
    OcrMisconfigured,
    OcrOutage,
    PagesFailed,
    ProcessInTrouble,
    RagServiceError,
    StorageUnavailable,
    StoreUnreachable,
)
from rag_service.jobs import leases, runs, server_state, wake_ups
from rag_service.jobs.leases import Blame, Claimant, ClaimedRun
from rag_service.runtime.process_resources import find_shortage, shortage_in
from rag_service.states import RunState, Stage
from workers import fork_deaths
from workers.fork_deaths import Report
from workers.memory_guard import MemoryGuard
from workers.run_guard import RunGuard, Work
from workers.store_watch import RETRY_SECONDS, StoreWatch
from workers.task_outcome import Outcome, OutcomeKind
from workers.worker_state import fork_count, is_draining, ocr_server, worker_id

log = logging.getLogger(__name__)

# The status of a fork that ends itself (sysexits.h: an error of the operating system).
EXIT_STATUS = os.EX_OSERR
_DATABASE_RETRY_SECONDS = 1.0
_LEASE_LOST = Outcome(
    OutcomeKind.NOTHING_DONE, "its lease was lost: it was cancelled, or another worker has it"
)
_memory_guard = MemoryGuard()
_store_watch = StoreWatch()


@cache
def event_loop() -> asyncio.Runner:
    """Return the fork's one event loop; its render child stays on it from document to document."""
    return asyncio.Runner()


def work_on_next(stage: Stage, task_id: str, work: Work) -> Outcome:
    """Claim the best run of the stage and work on it. Return the outcome.

    Ends the process if it lacks resources, or after an error that nothing here expects: a new
    fork takes its place.
    """
    try:
        return _work_on_next(stage, task_id, work)
    except (Exception, asyncio.CancelledError) as error:
        # The main process releases the run.
        _end(Report(Blame.CRASH, _describe(error)))


def _work_on_next(stage: Stage, task_id: str, work: Work) -> Outcome:
    refusal = _refusal(stage)
    if refusal is not None:
        return _nothing_done(refusal)
    claimant = Claimant(worker_id(stage), task_id, fork_count())
    try:
        run = leases.claim(stage, claimant, get_settings().lease, server=ocr_server())
        if run is None:
            return _nothing_claimed(task_id)
    except DatabaseError as error:
        _end_if_short()
        # Not raised: some driver errors cannot be pickled for the main process.
        log.warning("Cannot claim a run: %s", error_summary(error))
        return _nothing_done(f"PostgreSQL error: {error_summary(error)}")
    log.info("%s: run %s of %s, claim %d", stage, run.id, run.filename, run.epoch)
    outcome = _work_on(run, stage, task_id, work)
    _notify_next(stage)
    return Outcome(outcome.kind, f"{run.filename} (document {run.document_id}): {outcome.text}")


def _nothing_claimed(task_id: str) -> Outcome:
    # The broker delivers a message again while its task still works.
    if leases.is_at_work(task_id):
        return Outcome(OutcomeKind.STILL_AT_WORK, "the message was delivered again")
    return _nothing_done("no run waits that this worker may claim now")


def _nothing_done(reason: str) -> Outcome:
    return Outcome(OutcomeKind.NOTHING_DONE, f"no run claimed: {reason}")


def _work_on(run: ClaimedRun, stage: Stage, task_id: str, work: Work) -> Outcome:
    try:
        outcome = _outcome(stage, event_loop().run(_run_guarded(run, stage, work)))
    except Exception as error:
        report = _trouble(run, error)
        if report is not None:
            _give_up(stage, task_id, run, report)
        outcome = _handle_error(run, stage, error)
    fork_deaths.note_success()
    return outcome


def _outcome(stage: Stage, left_in: RunState) -> Outcome:
    """Return the outcome of work that left the run in this state."""
    if left_in is RunState.FAILED:
        return Outcome(OutcomeKind.FAILED, f"failed: {PagesFailed.code}")
    if left_in is RunState.PROCESSED:
        return Outcome(OutcomeKind.DONE, "processed")
    if left_in is RunState.REMOTE:
        return Outcome(OutcomeKind.DONE, "its pages are posted; it waits for the remote jobs")
    if stage is Stage.PREPARE:
        return Outcome(OutcomeKind.DONE, "its pages are planned; it waits for OCR")
    return _given_back("pages remain; it is claimed again later")


def _given_back(reason: str) -> Outcome:
    return Outcome(OutcomeKind.GIVEN_BACK, reason)


def _refusal(stage: Stage) -> str | None:
    """Return why this fork claims nothing now, or None. Ends a process that lacks resources."""
    pause = fork_deaths.pause_left()
    if pause > 0:
        return f"processes of this worker end one after the other; it pauses for {pause:.0f} s"
    _end_if_short()
    store = _store_watch.refusal(stage)
    if store is not None:
        return store
    if stage is Stage.OCR and not _memory_guard.allows_claim(get_settings()):
        return "this machine is short of memory"
    return None


def _end_if_short() -> None:
    short = find_shortage()
    if short is not None:
        _end(Report(Blame.NONE, short))


def _trouble(run: ClaimedRun, error: Exception) -> Report | None:
    """Return the report with which the process must end after this error, or None.

    No verdict on a document comes from a process that lacks resources. An error that nothing here
    expects may have left the process in any state.
    """
    if isinstance(error, LeaseLost | Draining):
        return None
    short = find_shortage()
    if short is not None:
        return Report(Blame.NONE, short, run.id)
    # The store's own disk may be full: that is an outage of the store.
    cause = None if isinstance(error, StorageUnavailable) else shortage_in(error)
    if isinstance(error, ProcessInTrouble) or cause is not None:
        return Report(Blame.TROUBLE, cause or str(error), run.id)
    if _is_expected(error):
        return None
    log.error("Run %s of %s: unexpected error", run.id, run.filename, exc_info=error)
    blame = Blame.TROUBLE if fork_deaths.is_worker_sick() else Blame.CRASH
    return Report(blame, _describe(error), run.id)


def _is_expected(error: Exception) -> bool:
    if isinstance(error, DatabaseError):
        return is_outage(error)
    return isinstance(error, DocumentError | FlowSignal) and not isinstance(error, Internal)


def _describe(error: BaseException) -> str:
    text = error_summary(error) if isinstance(error, DatabaseError) else str(error)
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def _give_up(stage: Stage, task_id: str, run: ClaimedRun, report: Report) -> NoReturn:
    """Give the run back and end the process."""
    try:
        leases.release_crashed(
            worker_id(stage), task_id, get_settings().lease, report.blame, report.reason
        )
    except Exception as error:
        # The main process releases the run, or its lease expires.
        log.error("Run %s could not be given back: %r", run.id, error)
    _end(report)


def _end(report: Report) -> NoReturn:
    """End this process at once: a clean exit needs what it may lack."""
    try:
        fork_deaths.leave_report(report)
        log.critical("This process ends, another takes its place: %s", report.reason)
    finally:
        os._exit(EXIT_STATUS)


async def _run_guarded(run: ClaimedRun, stage: Stage, work: Work) -> RunState:
    async with RunGuard(run, get_settings(), stage) as guard:
        return await work(guard)


def _handle_error(run: ClaimedRun, stage: Stage, error: Exception) -> Outcome:
    """Fail or release the run, depending on the error. Never raises.

    In an outage of PostgreSQL it tries until that is over: a run that stays claimed is silent until
    its lease expires.
    """
    noted = False
    while True:
        try:
            return _fail_or_release(run, stage, error)
        except LeaseLost:
            return _LEASE_LOST
        except DatabaseError as outage:
            if not is_outage(outage) or is_draining():
                log.exception("Run %s stays claimed until its lease expires", run.id)
                return _given_back(f"PostgreSQL error: {error_summary(outage)}")
            if not noted:
                log.warning("Cannot release run %s yet: %s", run.id, error_summary(outage))
            noted = True
        time.sleep(_DATABASE_RETRY_SECONDS)


def _fail_or_release(run: ClaimedRun, stage: Stage, error: Exception) -> Outcome:
    if isinstance(error, LeaseLost):
        # It is still held if the lease could not be renewed in an outage of PostgreSQL.
        leases.release(run)
        return _LEASE_LOST
    if isinstance(error, GaveWay):
        leases.give_way(run)
        return _given_back("gave its fork to documents that wait; goes on behind them")
    if isinstance(error, Draining):
        leases.release(run)
        return _given_back("released: the worker is shutting down")
    if isinstance(error, OcrOutage):
        return _park(run, error)
    if isinstance(error, StoreUnreachable):
        # Reported first: otherwise the run would seem to wait for a later try of a page.
        _store_watch.note_fault(stage, error)
        leases.release(run, retry_in=RETRY_SECONDS)
        return _given_back("waits for the document store")
    if isinstance(error, DatabaseError) and is_outage(error):
        leases.release(run, retry_in=_DATABASE_RETRY_SECONDS)
        return _given_back(f"released: {error_summary(error)}")
    if not isinstance(error, DocumentError):
        raise error
    runs.fail(run, error)
    return Outcome(OutcomeKind.FAILED, f"failed: {error.code}: {error.message}")


def _park(run: ClaimedRun, error: RagServiceError) -> Outcome:
    """Release the run until the OCR server works again; the outage is not charged to it."""
    log.warning("The OCR server is out, run %s waits: %s", run.id, error.message)
    server = ocr_server()
    if server is not None:
        server_state.mark_out(
            server, error.message, misconfigured=isinstance(error, OcrMisconfigured)
        )
    leases.release(run)
    return _given_back("waits for the OCR server")


def _notify_next(stage: Stage) -> None:
    try:
        waiting = runs.next_claimable(stage, ocr_server(), 1)
    except DatabaseError:
        # Maintenance sends the message when PostgreSQL is back.
        return
    for target in waiting:
        wake_ups.notify(stage, target.run_id, target.filename)
