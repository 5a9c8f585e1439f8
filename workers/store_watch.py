"""Keeps a fork from claiming runs, and from judging documents, while it cannot reach the store."""

from __future__ import annotations

import logging
import os
import time
from functools import cache

from rag_service.config.loader import get_settings
from rag_service.database.engine import DatabaseError, error_summary
from rag_service.documents.storage import DocumentStore
from rag_service.errors import StoreUnreachable
from rag_service.jobs import live_workers
from rag_service.states import Stage
from workers.worker_state import worker_id

log = logging.getLogger(__name__)

# Seconds until a run that was given back may be claimed again, perhaps on another machine.
RETRY_SECONDS = 5.0
# The report of a fault is renewed more often than it expires.
_REPORT_SECONDS = live_workers.ALIVE_SECONDS / 3


@cache
def _store_of(_pid: int) -> DocumentStore:
    return DocumentStore(get_settings())


def document_store() -> DocumentStore:
    """Return this fork's document store."""
    return _store_of(os.getpid())


class StoreWatch:
    """What this fork last reported about the store."""

    def __init__(self) -> None:
        self._reported_at = float("-inf")
        self._is_out = False

    def refusal(self, stage: Stage) -> str | None:
        """Return why this fork cannot work without the document store now, or None."""
        try:
            document_store().require_reachable()
        except StoreUnreachable as error:
            self.note_fault(stage, error)
            return f"the document store cannot be reached: {error.message}"
        except DatabaseError:
            # The claim that follows says it.
            return None
        if self._is_out:
            log.info("The document store is there again.")
            self._is_out = False
            self._report(stage, None)
        return None

    def note_fault(self, stage: Stage, error: StoreUnreachable) -> None:
        """Report the fault, for health and for `waiting_for`."""
        if not self._is_out:
            log.warning("No run is claimed without the document store: %s", error.message)
        self._is_out = True
        if time.monotonic() - self._reported_at >= _REPORT_SECONDS:
            self._report(stage, error.message)

    def _report(self, stage: Stage, message: str | None) -> None:
        try:
            live_workers.report_store_fault(worker_id(stage), message)
        except DatabaseError as error:
            log.warning("A fault of the store is not reported: %s", error_summary(error))
            return
        self._reported_at = time.monotonic() if message else float("-inf")
