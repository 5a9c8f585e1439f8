"""What a Celery worker's main process does besides Celery: heartbeats, lost children, idle restart.

Celery signals call this module. Its thread starts when the worker is ready.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
from typing import Any

from celery import signals
from celery.exceptions import WorkerLostError

from rag_service.config.loader import get_settings, warn_of_doubtful_settings
from rag_service.database import connection_budget
from rag_service.database.engine import DatabaseError, error_summary, limit_connections
from rag_service.jobs import leases, live_workers
from rag_service.jobs.leases import Blame
from rag_service.pdf.shrink import warn_of_missing_shrinker
from rag_service.runtime.log_format import configure_logging
from rag_service.runtime.memory import has_enough_memory
from rag_service.runtime.orphans import OrphanReaper
from rag_service.runtime.process_resources import find_shortage
from rag_service.states import Stage
from workers.fork_deaths import ForkDeaths, Report, take_report
from workers.server_check import StartCheck
from workers.worker_state import (
    begin_drain,
    fork_count,
    is_draining,
    ocr_server,
    set_fork_count,
    worker_id,
)

log = logging.getLogger(__name__)

# Celery's own check for lost children runs every 5 s.
_LOST_CHECK_SECONDS = 0.5
# Heartbeats in a row that fail for lack of resources, after which the worker restarts.
_SHORT_LIMIT = 3


class MainProcess:
    """Sends the heartbeats of one worker, for each stage that it consumes."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self._stopped = threading.Event()
        self._changed = threading.Event()
        self._last_message = time.monotonic()
        self._waiting_since: float | None = None
        self._deaths = ForkDeaths()
        self._short_heartbeats = 0

    def start(self, stages: list[Stage]) -> None:
        """Start the heartbeat thread, and the check of the OCR server."""
        self.stages = stages
        self._last_message = time.monotonic()
        threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True).start()
        if Stage.OCR in stages:
            StartCheck(get_settings(), self._stopped).start()

    def note_message(self) -> None:
        """Note that Celery received a message."""
        self._last_message = time.monotonic()

    def release_lost(self, task_id: str, how: str) -> None:
        """Release the run of a child that ended on this task, at once, and count its end."""
        report = take_report() or Report(Blame.CRASH, how)
        if self._deaths.is_worker_sick and report.blame is Blame.CRASH:
            report = Report(Blame.TROUBLE, report.reason)
        released = [self._release(stage, task_id, report) for stage in self.stages]
        subject = report.run or next(filter(None, released), "")
        pause = self._deaths.add(subject, report.reason)
        if pause:
            log.error(
                "%d processes in a row ended without a result; none claims a run for %.0f s. The "
                "last: %s", self._deaths.count, pause, report.reason,
            )  # fmt: skip
        self._changed.set()

    def _release(self, stage: Stage, task_id: str, report: Report) -> str | None:
        try:
            released = leases.release_crashed(
                worker_id(stage), task_id, get_settings().lease, report.blame, report.reason
            )
        except DatabaseError as error:
            log.error("The lease of a lost child stays until it expires: %s", error_summary(error))
            return None
        if released:
            log.warning("A child died on task %s; its run goes back to the queue.", task_id)
        return released

    def stop(self) -> None:
        """Release what the forks, which have ended, still had claimed."""
        self._stopped.set()
        self._changed.set()
        for stage in self.stages:
            try:
                leases.release_worker(worker_id(stage))
                live_workers.remove(worker_id(stage))
            except DatabaseError as error:
                log.error("Leases stay until they expire: %s", error_summary(error))

    def _send_heartbeats(self) -> None:
        reaper = OrphanReaper()
        while not self._stopped.is_set():
            try:
                reaper.reap()
                self._send_heartbeat()
                self._short_heartbeats = 0
            except DatabaseError as error:
                log.warning("PostgreSQL error: %s", error_summary(error))
                self._waiting_since = None
                self._restart_if_short()
            except Exception:
                # This thread must not end: a worker without heartbeats looks dead.
                log.exception("The heartbeat failed")
                self._restart_if_short()
            # Deaths of forks are to be seen at once.
            self._changed.wait(live_workers.HEARTBEAT_SECONDS)
            self._changed.clear()

    def _send_heartbeat(self) -> None:
        self._deaths.refresh()
        claimable = 0
        for stage in self.stages:
            live_workers.heartbeat(
                worker_id(stage),
                stage,
                fork_count(),
                low_memory=stage is Stage.OCR and not has_enough_memory(get_settings()),
                fork_deaths=self._deaths.count,
                trouble=self._deaths.trouble,
            )
            claimable += _claimable_by_free_forks(stage)
        self._restart_if_idle(claimable)

    def _restart_if_short(self) -> None:
        """Restart the worker if this process has lacked resources for several heartbeats."""
        short = find_shortage()
        self._short_heartbeats = self._short_heartbeats + 1 if short else 0
        if self._short_heartbeats >= _SHORT_LIMIT:
            log.critical("The worker's main process restarts: %s", short)
            self._restart()

    def _restart_if_idle(self, claimable: int) -> None:
        """Restart the worker if runs have waited for it too long without a message."""
        now, limit = time.monotonic(), get_settings().worker.idle_restart_after
        if claimable == 0:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        elif now - max(self._waiting_since, self._last_message) > limit:
            log.error(
                "No task message for %.0f s although runs are waiting; restarting the worker.",
                limit,
            )
            self._restart()

    def _restart(self) -> None:
        self._stopped.set()
        atexit.register(os.execv, sys.executable, [sys.executable, *sys.orig_argv[1:]])
        os.kill(os.getpid(), signal.SIGTERM)


def _claimable_by_free_forks(stage: Stage) -> int:
    """Return how many runs the free forks of this worker may claim now."""
    own = [load for load in live_workers.of_stage(stage) if load.id == worker_id(stage)]
    free = sum(worker.free for worker in own)
    counts = live_workers.claimable_counts(stage, ocr_server(), free)
    return live_workers.wake_ups_wanted(own, *counts)


_main = MainProcess()


@signals.setup_logging.connect
def _logging(**_: Any) -> None:
    configure_logging(get_settings())


@signals.worker_init.connect
def _init(sender: Any, **_: Any) -> None:
    set_fork_count(sender.concurrency)
    limit_connections(connection_budget.FORK)
    needed = connection_budget.worker_connections(fork_count())
    connection_budget.warn_of_shortage({f"this worker with {fork_count()} forks": needed})


@signals.celeryd_after_setup.connect
def _set_up(instance: Any, **_: Any) -> None:
    if Stage.OCR.value not in instance.app.amqp.queues.consume_from:
        return
    settings = get_settings()
    if settings.unset_for_pages is not None:
        log.critical("No OCR server is set: %s", settings.unset_for_pages)
        # Celery catches every other exception of a signal handler.
        raise SystemExit(2)
    warn_of_doubtful_settings(settings)
    if settings.ocr.transport == "runpod" and settings.pdf.downsample_oversized:
        warn_of_missing_shrinker()


@signals.worker_ready.connect
def _ready(sender: Any, **_: Any) -> None:
    consumed = {queue.name for queue in sender.task_consumer.queues}
    _main.start([stage for stage in Stage if stage.value in consumed])
    sender.hub.call_repeatedly(_LOST_CHECK_SECONDS, sender.pool.maintain_pool)


@signals.task_received.connect
def _received(**_: Any) -> None:
    _main.note_message()


@signals.task_failure.connect
def _failed(task_id: str, exception: BaseException, **_: Any) -> None:
    if isinstance(exception, WorkerLostError) and not is_draining():
        _main.release_lost(task_id, str(exception))


@signals.worker_shutting_down.connect
def _shutting_down(**_: Any) -> None:
    begin_drain()


@signals.worker_shutdown.connect
def _shutdown(**_: Any) -> None:
    _main.stop()
