"""What all workers know together about the OCR server, shared through the database."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from datetime import datetime

from rag_service.config.loader import get_settings
from rag_service.database.engine import DatabaseError, error_summary
from rag_service.jobs import fork_loads, limit_changes, live_workers, server_state
from rag_service.jobs.fork_loads import TotalLoad
from rag_service.jobs.server_state import ServerRecord
from rag_service.ocr.concurrency.limiter import LimiterLoad, Together
from rag_service.states import ServerState, Stage
from workers.run_guard import RunGuard
from workers.worker_state import fork_count, ocr_server, worker_id

log = logging.getLogger(__name__)

# The database row of the last answered page and that of the requests in flight may be this old.
_ANSWERED_NOTE_SECONDS = 2.0
_LOAD_NOTE_SECONDS = 5.0
# The part of the limit that counts as all of it: at times one request has just ended.
_USED = 0.8


class SharedServerWatch:
    """A ServerWatch for one run of this fork."""

    def __init__(self, guard: RunGuard) -> None:
        self._guard = guard
        self._noted_at = float("-inf")
        self._answers = 0
        self._reported_at = float("-inf")
        self._reported = 0.0
        # The last two fork counts, newest last: a count is steady once it was read twice.
        self._forks: deque[int] = deque([0, 0], maxlen=2)

    async def is_up(self) -> bool:
        """Return False while the server is out or on trial."""
        record = await self._record()
        return record is None or record.state is ServerState.UP

    async def last_answer(self) -> tuple[datetime | None, int]:
        """Return when any worker last noted an answered page, and the number of this run's own.

        A note is made when a page is answered, never later: one from before an outage would look
        like a page that was read in it.
        """
        record = await self._record()
        return record.last_success_at if record else None, self._answers

    async def answered(self) -> None:
        """Note an answered page; the first one of the run at once."""
        self._answers += 1
        if time.monotonic() - self._noted_at >= _ANSWERED_NOTE_SECONDS:
            await self._note()

    async def good_limit(self) -> float | None:
        """Return this fork's part of the server's last good number in flight, or None."""
        together = await self._guard.call(lambda: fork_loads.good_in_flight(_url()))
        return together and together / await self.processes()

    async def processes(self) -> int:
        """Return the number of forks of all ocr workers that are alive, at least this worker's."""
        return max(fork_count(), await self._guard.call(_live_forks))

    async def report(self, load: LimiterLoad) -> Together | None:
        """Store this fork's load; return that of all forks, or None if it is too early to ask."""
        is_due = time.monotonic() - self._reported_at >= _LOAD_NOTE_SECONDS
        is_first_sent = load.in_flight > 0 and not self._reported
        if not (is_due or is_first_sent):
            return None
        self._reported = load.in_flight
        await self._guard.call(
            lambda: fork_loads.report(_fork(), _url(), load.in_flight, load.limit)
        )
        changes = load.changes.take()
        await self._guard.call(lambda: limit_changes.add(_fork(), _url(), changes))
        # Between two documents a fork is missing for a moment. A fork that asked twice in that
        # moment would take over its part.
        if not is_due:
            return None
        self._reported_at = time.monotonic()
        total = await self._guard.call(lambda: fork_loads.total(_url()))
        if load.is_settled and self._is_steady(total):
            good = (total.limit or 0.0) / get_settings().ocr.server_share
            await self._guard.call(lambda: fork_loads.store_good_in_flight(_url(), good))
        return Together(total.forks, total.limit)

    def _is_steady(self, total: TotalLoad) -> bool:
        """Return whether all forks use their limit; the forks of the last documents do not."""
        is_stable = set(self._forks) == {total.forks}
        self._forks.append(total.forks)
        return is_stable and total.in_flight >= _USED * (total.limit or math.inf)

    async def _note(self) -> None:
        self._noted_at = time.monotonic()
        await self._guard.call(lambda: server_state.mark_answered(_url()))

    async def _record(self) -> ServerRecord | None:
        return await self._guard.call(lambda: server_state.get(_url()))


def remove_load() -> None:
    """Remove this fork's load; if the database fails, the load expires on its own."""
    try:
        fork_loads.remove(_fork())
    except DatabaseError as error:
        log.warning("The load of this fork is counted until it expires: %s", error_summary(error))


def _live_forks() -> int:
    return sum(worker.forks for worker in live_workers.of_stage(Stage.OCR))


def _fork() -> str:
    return f"{worker_id(Stage.OCR)}:{os.getpid()}"


def _url() -> str:
    return ocr_server() or ""
