"""Checks of the document store that end in time, also if the store hangs.

A hanging file system blocks each thread that touches it, so only one thread ever checks.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path

from rag_service.database.engine import DatabaseError
from rag_service.documents.storage import DocumentStore
from rag_service.errors import RagServiceError, StoreUnreachable

_LONGEST_SECONDS = 6.0
# A check that passed this long ago still counts for an upload.
_FRESH_SECONDS = 2.0


class StoreCheck:
    """Checks one store; callers that come during a check share it."""

    def __init__(self, store: DocumentStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._running: Future[Path] | None = None
        self._began = float("-inf")

    def require(self) -> None:
        """Check now that the store can be written to.

        Raises StorageUnavailable, also if there is no answer in time, and DatabaseError.
        """
        self._wait(self._begin(fresh=0.0))

    def incoming(self) -> Path:
        """Return the folder for uploads; check the store if it was not checked lately.

        Raises what require() raises.
        """
        return self._wait(self._begin(fresh=_FRESH_SECONDS))

    def incoming_if_reachable(self) -> Path | None:
        """Return the folder for uploads, or None if the store fails, hangs or is not known."""
        try:
            return self.incoming()
        except (RagServiceError, DatabaseError):
            return None

    def _begin(self, fresh: float) -> Future[Path]:
        with self._lock:
            running, now = self._running, time.monotonic()
            if running is not None:
                if not running.done():
                    return running
                if running.exception() is None and now - self._began < fresh:
                    return running
            self._running, self._began = Future(), now
            # Not of a pool, which would keep the process from ending while the store hangs.
            threading.Thread(
                target=self._run, args=(self._running,), name="store check", daemon=True
            ).start()
            return self._running

    def _run(self, result: Future[Path]) -> None:
        try:
            self._store.check()
            result.set_result(self._store.incoming())
        except BaseException as error:
            result.set_exception(error)

    def _wait(self, running: Future[Path]) -> Path:
        try:
            return running.result(max(0.0, self._began + _LONGEST_SECONDS - time.monotonic()))
        except TimeoutError:
            if running.done():
                raise
            seconds = time.monotonic() - self._began
            raise StoreUnreachable(
                f"The document store has not answered for {seconds:.0f} s."
            ) from None
