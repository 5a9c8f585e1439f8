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
from rag_service.database.engine import DatabaseError, error_summary
from rag_service.jobs import leases, live_workers
from rag_service.pdf.shrink import warn_of_missing_shrinker
from rag_service.runtime.log_format import configure_logging
from rag_service.runtime.memory import has_enough_memory
from rag_service.states import Stage
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


class MainProcess:
    """Sends the heartbeats of one worker, for each stage that it consumes."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self._stopped = threading.Event()
        self._last_message = time.monotonic()
        self._waiting_since: float | None = None

    def start(self, stages: list[Stage]) -> None:
        """Start the heartbeat thread."""
        self.stages = stages
        self._last_message = time.monotonic()
        threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True).start()

    def note_message(self) -> None:
        """Note that Celery received a message."""
        self._last_message = time.monotonic()

    def release_lost(self, task_id: str) -> None:
        """Release the run of a child that died on this task, at once, and count the crash."""
        for stage in self.stages:
            try:
                released = leases.release_crashed(worker_id(stage), task_id, get_settings().lease)
            except DatabaseError as error:
                log.error(
                    "The lease of a lost child stays until it expires: %s", error_summary(error)
                )
                continue
            if released:
                log.warning("A child died on task %s; its run goes back to the queue.", task_id)

    def stop(self) -> None:
        """Release what the forks, which have ended, still had claimed."""
        self._stopped.set()
        for stage in self.stages:
            try:
                leases.release_worker(worker_id(stage))
                live_workers.remove(worker_id(stage))
            except DatabaseError as error:
                log.error("Leases stay until they expire: %s", error_summary(error))

    def _send_heartbeats(self) -> None:
        while not self._stopped.is_set():
            try:
                self._send_heartbeat()
            except DatabaseError as error:
                log.warning("PostgreSQL error: %s", error_summary(error))
                self._waiting_since = None
            self._stopped.wait(live_workers.HEARTBEAT_SECONDS)

    def _send_heartbeat(self) -> None:
        claimable = 0
        for stage in self.stages:
            low_memory = stage is Stage.OCR and not has_enough_memory(get_settings())
            live_workers.heartbeat(worker_id(stage), stage, fork_count(), low_memory=low_memory)
            claimable += _claimable_by_free_forks(stage)
        self._restart_if_idle(claimable)

    def _restart_if_idle(self, claimable: int) -> None:
        """Restart the worker if runs have waited for it too long without a message."""
        now, limit = time.monotonic(), get_settings().worker.idle_restart_after
        if claimable == 0:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        elif now - max(self._waiting_since, self._last_message) > limit:
            self._restart(limit)

    def _restart(self, idle_seconds: float) -> None:
        log.error(
            "No task message for %.0f s although runs are waiting; restarting the worker.",
            idle_seconds,
        )
        self._stopped.set()
        atexit.register(os.execv, sys.executable, [sys.executable, *sys.orig_argv[1:]])
        os.kill(os.getpid(), signal.SIGTERM)


def _claimable_by_free_forks(stage: Stage) -> int:
    """Return how many runs the free forks of this worker may claim now."""
    own = [load for load in live_workers.of_stage(stage) if load.id == worker_id(stage)]
    return live_workers.wake_ups_wanted(own, *live_workers.claimable_counts(stage, ocr_server()))


_main = MainProcess()


@signals.setup_logging.connect
def _logging(**_: Any) -> None:
    configure_logging(get_settings())


@signals.worker_init.connect
def _init(sender: Any, **_: Any) -> None:
    set_fork_count(sender.concurrency)


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
        _main.release_lost(task_id)


@signals.worker_shutting_down.connect
def _shutting_down(**_: Any) -> None:
    begin_drain()


@signals.worker_shutdown.connect
def _shutdown(**_: Any) -> None:
    _main.stop()
