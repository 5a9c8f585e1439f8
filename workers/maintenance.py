"""The maintenance loop: expired leases, wake-up messages, outages, removals. One process runs it.

A plain process, not a Celery task: it repairs idle workers and lost messages, so it must not
depend on Celery or the broker. Start it with `rag-service worker maintenance`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from rag_service.config.options import Settings
from rag_service.database import connection_budget, totals
from rag_service.database.engine import (
    DatabaseError,
    error_summary,
    limit_connections,
    reserve_connection,
)
from rag_service.documents import bulk_reprocess, deletion
from rag_service.documents.incoming_file import remove_stale
from rag_service.documents.storage import DocumentStore
from rag_service.errors import OcrUnavailable, StorageUnavailable
from rag_service.jobs import leases, live_workers, remote_posts, runs, server_state, wake_ups
from rag_service.jobs.live_workers import MaintenanceClaim
from rag_service.jobs.server_state import ServerRecord
from rag_service.knowledgebase import reprocess_jobs
from rag_service.monitoring.gauge_sampler import Sampler
from rag_service.ocr.ocr_client import Probe
from rag_service.runtime.log_format import configure_logging
from rag_service.states import ServerState, Stage
from workers.remote.endpoint_watch import EndpointWatch
from workers.remote.polling import AT_ONCE, poll_due
from workers.server_check import check_settings, probe_page_server, store_alarm
from workers.worker_state import ocr_server

log = logging.getLogger(__name__)

# Between two searches for files that killed uploads left.
_SWEEP_SECONDS = 60.0


def main(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT."""
    configure_logging(settings)
    limit_connections(connection_budget.MAINTENANCE)
    reserve_connection()
    connection_budget.warn_of_shortage({"maintenance": connection_budget.MAINTENANCE})
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    MaintenanceLoop(settings, stop).run()


class MaintenanceLoop:
    """Does rounds while it holds the lease. A round waits for no network except PostgreSQL."""

    def __init__(self, settings: Settings, stop: threading.Event) -> None:
        self._settings = settings
        self._stop = stop
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"
        self._store = DocumentStore(settings)
        self._threads = ThreadPoolExecutor(max_workers=7, thread_name_prefix="maintenance")
        self._running: dict[str, Future[object]] = {}
        self._probed_at = float("-inf")
        self._swept_at = float("-inf")
        self._watch = EndpointWatch(settings)
        self._sampler = Sampler(settings)
        # PostgreSQL was unreachable before this moment, so no worker could renew a lease.
        self._reachable_since = float("-inf")
        self._claim: MaintenanceClaim | None = None

    def run(self) -> None:
        """Do rounds until the stop event is set."""
        while not self._stop.is_set():
            try:
                self._round_if_holder()
            except DatabaseError as error:
                log.warning("PostgreSQL error: %s", error_summary(error))
                self._reachable_since = float("inf")
            self._stop.wait(self._settings.maintenance.interval)
        self._leave()

    def _round_if_holder(self) -> None:
        claim = live_workers.claim_maintenance(self._holder, self._settings.maintenance.lease)
        if self._reachable_since == float("inf"):
            self._reachable_since = time.monotonic()
        if claim is None:
            return
        if claim != self._claim:
            log.info("%s holds maintenance, epoch %d", claim.holder, claim.epoch)
            self._claim = claim
        self.round()

    def round(self) -> None:
        """Do one round: leases, then wake-up messages; start the rest in threads."""
        if time.monotonic() - self._reachable_since > self._settings.lease.seconds:
            expired = leases.release_expired(self._settings.lease)
            if expired:
                log.warning("%d leases expired; their runs go back to the queue.", expired)
        for stage in Stage:
            self._notify_workers(stage)
        self._start("servers", self._check_server)
        self._start("remote jobs", self._follow_remote_jobs)
        if self._settings.ocr.transport == "runpod":
            self._start("endpoint", self._watch_endpoint)
        self._start("occupancy", self._sampler.sample_if_due)
        self._start("removals", self._remove_deleted)
        self._start("totals", totals.add_changes)
        self._start("reprocess jobs", self._reprocess)

    def _notify_workers(self, stage: Stage) -> None:
        """Send wake-up messages for what free forks may claim, less those still in the queue."""
        server = ocr_server()
        workers = live_workers.of_stage(stage)
        free = sum(worker.free for worker in workers)
        wanted = live_workers.wake_ups_wanted(
            workers, *live_workers.claimable_counts(stage, server, free)
        )
        if wanted == 0:
            return
        queued = wake_ups.queue_length(stage)
        if queued is None:
            return
        for target in runs.next_claimable(stage, server, max(0, wanted - queued)):
            if not wake_ups.notify(stage, target.run_id, target.filename):
                return

    def _start(self, name: str, work: Callable[[], object]) -> None:
        """Start the work in a thread, unless its last call still runs."""
        last = self._running.get(name)
        if last is not None and not last.done():
            return
        if last is not None and (error := last.exception()) is not None:
            log.warning("%s: %s", name, error)
        self._running[name] = self._threads.submit(work)

    def _check_server(self) -> None:
        """Probe a server that is out, begin its trial, fail runs that waited too long."""
        server = ocr_server()
        record = server_state.get(server) if server else None
        if record is None:
            return
        if record.state is ServerState.UP:
            self._recheck_settings(record)
            return
        server_state.end_stale_trial(record.url)
        limit = self._settings.ocr.outage_limit
        failed = server_state.fail_long_parked(
            record.url, limit, OcrUnavailable(f"{OcrUnavailable().message} ({record.message})")
        )
        if failed:
            log.error("%d documents waited for %s longer than %.0f s.", failed, record.url, limit)
        if record.state is not ServerState.TRIAL and self._probe_is_due():
            self._apply_probe(record.url, asyncio.run(probe_page_server(self._settings)))

    def _follow_remote_jobs(self) -> None:
        """Poll jobs that no fork follows, cancel those to be cancelled, wake runs to post again."""
        while not self._stop.is_set() and asyncio.run(poll_due(self._settings)) == AT_ONCE:
            continue
        remote_posts.note_abandoned()
        runpod = self._settings.runpod
        if runpod.handler_volume:
            remote_posts.wake_for_reposts(runpod.repost_after)

    def _watch_endpoint(self) -> None:
        asyncio.run(self._watch.check())

    def _probe_is_due(self) -> bool:
        now = time.monotonic()
        if now - self._probed_at < self._settings.ocr.probe_interval:
            return False
        self._probed_at = now
        return True

    def _recheck_settings(self, record: ServerRecord) -> None:
        """Check again what a worker found wrong with a direct server when it started."""
        is_direct = self._settings.ocr.transport == "direct"
        if is_direct and server_state.FAULT in record.alarms and self._probe_is_due():
            store_alarm(record.url, asyncio.run(check_settings(self._settings)))

    def _apply_probe(self, url: str, probe: Probe) -> None:
        if not probe.ok:
            if server_state.mark_out(url, probe.message, misconfigured=probe.misconfigured):
                log.warning("%s is out: %s", url, probe.message)
            return
        trial = server_state.begin_trial(url)
        log.info(
            "%s passes its probe; %s", url, f"trial with run {trial}" if trial else "no run waits"
        )

    def _remove_deleted(self) -> None:
        removed = deletion.remove_deleted(self._store)
        if removed:
            log.info("%d deleted documents were removed with their files.", removed)
        live_workers.remove_stale()
        reprocess_jobs.remove_ended()
        self._remove_interrupted_uploads()

    def _reprocess(self) -> None:
        handled = bulk_reprocess.advance(self._settings, self._stop)
        if handled:
            log.info("%d documents of reprocess jobs were handled.", handled)

    def _remove_interrupted_uploads(self) -> None:
        now = time.monotonic()
        if now - self._swept_at < _SWEEP_SECONDS:
            return
        self._swept_at = now
        try:
            removed = remove_stale(self._store.incoming())
        except StorageUnavailable as error:
            log.warning("Files of interrupted uploads are not removed: %s", error)
            return
        if removed:
            log.info("%d files of interrupted uploads were removed.", removed)

    def _leave(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._claim is None:
            return
        try:
            live_workers.release_maintenance(self._claim)
        except DatabaseError as error:
            log.warning("The maintenance lease stays until it expires: %s", error)
