"""What a Celery worker's main process does beside Celery: beats, counts crashes, notices deafness.

Connected by signals when the application loads; the threads begin once the worker is ready.
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
from rag_service.runtime.memory import has_room
from rag_service.states import Stage
from workers import drain
from workers.identity import forks, ocr_server, set_forks, worker_id

log = logging.getLogger(__name__)

# Celery by itself looks for lost children every 5 s.
_LOST_CHECK_SECONDS = 0.5


class MainProcess:
    """The beats of one worker, for each stage it consumes."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self._stopped = threading.Event()
        self._last_doorbell = time.monotonic()
        self._waiting_since: float | None = None

    def start(self, stages: list[Stage]) -> None:
        """Begin to beat."""
        self.stages = stages
        self._last_doorbell = time.monotonic()
        threading.Thread(target=self._beats, name="beat", daemon=True).start()

    def doorbell(self) -> None:
        """Celery received a message."""
        self._last_doorbell = time.monotonic()

    def lost(self, task_id: str) -> None:
        """A child died: release its run at once and count the crash."""
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
        """The forks are gone: give back what they held."""
        self._stopped.set()
        for stage in self.stages:
            try:
                leases.release_worker(worker_id(stage))
                live_workers.remove(worker_id(stage))
            except DatabaseError as error:
                log.error("Leases stay until they expire: %s", error_summary(error))

    def _beats(self) -> None:
        while not self._stopped.is_set():
            try:
                self._beat()
            except DatabaseError as error:
                log.warning("PostgreSQL does not do its part: %s", error_summary(error))
                self._waiting_since = None
            self._stopped.wait(live_workers.HEARTBEAT_SECONDS)

    def _beat(self) -> None:
        wanted = 0
        for stage in self.stages:
            guarded = stage is Stage.OCR and not has_room(get_settings())
            live_workers.heartbeat(worker_id(stage), stage, forks(), low_memory=guarded)
            wanted += _claimable_by(stage)
        now = time.monotonic()
        if wanted == 0:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        elif (
            now - max(self._waiting_since, self._last_doorbell)
            > get_settings().worker.idle_restart_after
        ):
            self._restart()

    def _restart(self) -> None:
        """No doorbell came although our free forks could take runs: begin anew."""
        log.error("Deaf: runs wait for free forks and no doorbell came. Restarting.")
        self._stopped.set()
        atexit.register(os.execv, sys.executable, [sys.executable, *sys.orig_argv[1:]])
        os.kill(os.getpid(), signal.SIGTERM)


def _claimable_by(stage: Stage) -> int:
    """Runs that this worker's own free forks may claim now."""
    mine = [load for load in live_workers.of_stage(stage) if load.id == worker_id(stage)]
    return live_workers.wake_ups_wanted(mine, *live_workers.claimable_counts(stage, ocr_server()))


_main = MainProcess()


@signals.setup_logging.connect
def _logging(**_: Any) -> None:
    configure_logging(get_settings())


@signals.worker_init.connect
def _init(sender: Any, **_: Any) -> None:
    set_forks(sender.concurrency)


@signals.celeryd_after_setup.connect
def _set_up(instance: Any, **_: Any) -> None:
    if Stage.OCR.value not in instance.app.amqp.queues.consume_from:
        return
    settings = get_settings()
    if settings.unset_for_pages is not None:
        # No page could travel. Only this gets out of a signal's handler.
        log.critical("There is no server to read with: %s", settings.unset_for_pages)
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
    _main.doorbell()


@signals.task_failure.connect
def _failed(task_id: str, exception: BaseException, **_: Any) -> None:
    if isinstance(exception, WorkerLostError) and not drain.has_begun():
        _main.lost(task_id)


@signals.worker_shutting_down.connect
def _shutting_down(**_: Any) -> None:
    drain.begin()


@signals.worker_shutdown.connect
def _shutdown(**_: Any) -> None:
    _main.stop()
