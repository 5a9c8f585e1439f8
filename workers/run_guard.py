"""Guards a claimed run: a thread renews the lease, and work stops if the lease is lost."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeVar, cast

from rag_service.config.options import Settings
from rag_service.database.engine import (
    DatabaseError,
    error_summary,
    is_outage,
    reserve_connection,
)
from rag_service.errors import (
    DocumentTimeout,
    Draining,
    GaveWay,
    LeaseLost,
    ProcessInTrouble,
    RagServiceError,
)
from rag_service.jobs import leases
from rag_service.jobs.leases import ClaimedRun
from rag_service.runtime.process_resources import require_resources
from rag_service.states import RunState, Stage
from workers.turn import Turn
from workers.worker_state import is_draining

log = logging.getLogger(__name__)

T = TypeVar("T")
_TICK_SECONDS = 1.0
_CHECK_SECONDS = 3.0
_DATABASE_RETRY_SECONDS = 1.0


class RunGuard:
    """Guards one claimed run. Enter it in the fork's main thread, inside the event loop."""

    def __init__(self, run: ClaimedRun, settings: Settings, stage: Stage) -> None:
        self.run = run
        self._turn = Turn(run, stage, settings)
        self.page_count = run.page_count
        self._settings = settings
        self._claimed_at = self._renewed_at = time.monotonic()
        self._draining_since: float | None = None
        self._reason: RagServiceError | None = None
        self._closed = threading.Event()

    async def __aenter__(self) -> RunGuard:
        self._loop = asyncio.get_running_loop()
        self._work = cast("asyncio.Task[None]", asyncio.current_task())
        self._guarding = asyncio.create_task(self._check_regularly())
        threading.Thread(target=self._renew_regularly, name="lease", daemon=True).start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed.set()
        self._guarding.cancel()
        # _stop() cancelled the work: raise its reason instead.
        if isinstance(error, asyncio.CancelledError) and self._reason is not None:
            raise self._reason from error

    def check(self) -> None:
        """Raise the reason to stop, or LeaseLost if the lease could not be renewed in time."""
        if self._reason is not None:
            raise self._reason
        if time.monotonic() - self._renewed_at > self._settings.lease.give_up_after:
            raise LeaseLost("The lease could not be renewed in time.")

    def check_drain(self) -> None:
        """Call before new work: raise Draining if the worker is shutting down, or LeaseLost.

        Raises GaveWay if the run has had its turn and others wait.
        """
        self.check()
        if is_draining():
            raise Draining()
        if self._turn.is_over:
            raise GaveWay()

    async def call(self, function: Callable[[], T]) -> T:
        """Run a database call off the event loop; retry in an outage until the lease is lost.

        Raises LeaseLost, and ProcessInTrouble if this process is the cause.
        """
        while True:
            self.check()
            try:
                return await asyncio.to_thread(function)
            except DatabaseError as error:
                if not is_outage(error):
                    raise
                require_resources(error)
                log.warning("PostgreSQL error, trying again: %s", error_summary(error))
            await asyncio.sleep(_DATABASE_RETRY_SECONDS)

    async def _check_regularly(self) -> None:
        """Run in the event loop, which a hanging database call cannot block."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            try:
                self.check()
                self._check_limits()
            except RagServiceError as reason:
                self._stop(reason)
                return

    def _renew_regularly(self) -> None:
        """Run in a thread, which a busy event loop cannot block."""
        reserve_connection()
        # More often than renewals: a cancelled run must free the server's slots soon.
        pause = min(_CHECK_SECONDS, self._settings.lease.renew_every)
        while not self._closed.wait(pause):
            reason = self._reason_to_stop() or self._turn.end_if_over()
            if reason is not None:
                self._loop.call_soon_threadsafe(self._stop, reason)
                return

    def _reason_to_stop(self) -> RagServiceError | None:
        """Renew the lease. The thread must not end on an error: the work would go on unguarded."""
        try:
            return None if self._renew_or_check() else LeaseLost()
        except DatabaseError as error:
            log.warning("Cannot renew the lease: %s", error_summary(error))
            return None
        except Exception as error:
            return ProcessInTrouble(f"The lease cannot be renewed: {error!r}")

    def _renew_or_check(self) -> bool:
        now = time.monotonic()
        if now - self._renewed_at < self._settings.lease.renew_every:
            return leases.is_valid(self.run)
        renewed = leases.renew(self.run, self._settings.lease)
        if renewed:
            self._renewed_at = now
        return renewed

    def _check_limits(self) -> None:
        now = time.monotonic()
        if is_draining():
            self._draining_since = self._draining_since or now
            if now - self._draining_since > self._settings.worker.soft_shutdown:
                raise Draining()
        limits = self._settings.document_timeout
        allowed = limits.base + limits.per_page * (self.page_count or 0)
        if self.run.worked_seconds + now - self._claimed_at > allowed:
            raise DocumentTimeout(
                f"Worked on for more than {allowed:.0f} s (document_timeout.base + "
                f"{self.page_count or 0} x document_timeout.per_page); pages read so far are kept."
            )

    def _stop(self, reason: RagServiceError) -> None:
        if self._reason is None:
            self._reason = reason
            self._work.cancel()


# Work on a run ends with the state in which it leaves the run.
Work = Callable[[RunGuard], Awaitable[RunState]]
