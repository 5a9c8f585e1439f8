"""A document's turn on a fork of the prepare worker: when it is over and others wait, it gives way.

A document that needs much more time than others then waits behind them and goes on later with the
pages that it has not stored. Its turns grow with the time that it was worked on, so that it ends.
"""

from __future__ import annotations

import logging
import time

from rag_service.config.options import Settings
from rag_service.database.engine import DatabaseError, error_summary
from rag_service.errors import GaveWay
from rag_service.jobs import leases
from rag_service.jobs.leases import ClaimedRun
from rag_service.states import Stage

log = logging.getLogger(__name__)

# The longest turn, as a multiple of worker.turn. It ends between two pages, not within one, so that
# each such turn stores at least one page.
_LONGEST = 6


class Turn:
    """The turn of one claimed run; at other stages than prepare it does not end."""

    def __init__(self, run: ClaimedRun, stage: Stage, settings: Settings) -> None:
        self._run = run
        self._has_end = stage is Stage.PREPARE
        self._began = time.monotonic()
        self._longest = _LONGEST * settings.worker.turn
        self._seconds = min(max(settings.worker.turn, run.worked_seconds), self._longest)
        self.is_over = False

    def end_if_over(self) -> GaveWay | None:
        """End the turn if it has lasted long enough and others wait; queries the database then.

        Return the reason to stop at once, or None if the work is to stop before its next page.
        """
        passed = time.monotonic() - self._began
        if not self._has_end or self.is_over or passed < self._seconds or not self._others_wait():
            return None
        self.is_over = True
        log.info("Run %s of %s gives way after %.0f s", self._run.id, self._run.filename, passed)
        return GaveWay() if self._seconds < self._longest else None

    def _others_wait(self) -> bool:
        try:
            return leases.others_wait(Stage.PREPARE, self._run)
        except DatabaseError as error:
            log.warning("Cannot see whether runs wait: %s", error_summary(error))
            return False
