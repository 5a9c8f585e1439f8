"""Planned pages on their way from the render child to the caller, who is woken for many at once.

A page waits at most FLUSH_SECONDS, so that it is not held up by a slow page behind it.
"""

from __future__ import annotations

import asyncio

from rag_service.pdf.results import PlannedPage

# Pages planned per request, and requests planned before the caller takes the first result.
BATCH = 32
BATCHES_AHEAD = 2
FLUSH_SECONDS = 1.0


class PlannedQueue:
    """One producer puts pages, one consumer takes them in order."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[list[PlannedPage] | None] = asyncio.Queue()
        self._free = asyncio.Semaphore(BATCHES_AHEAD)
        self._unsent: list[PlannedPage] = []
        self._timer: asyncio.TimerHandle | None = None
        self._taken = 0

    async def wait_for_place(self) -> None:
        """Wait until BATCH more pages may be planned."""
        await self._free.acquire()

    def put(self, page: PlannedPage) -> None:
        self._unsent.append(page)
        if len(self._unsent) >= BATCH:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self.flush)

    def flush(self) -> None:
        """Hand over what was put so far."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._unsent:
            self._queue.put_nowait(self._unsent)
            self._unsent = []

    def end(self) -> None:
        """Note that no page follows."""
        self.flush()
        self._queue.put_nowait(None)

    async def take(self) -> list[PlannedPage] | None:
        """Return the next pages, or None at the end."""
        return await self._queue.get()

    def release(self, pages: int) -> None:
        """Let as many more pages be planned as the caller has used."""
        self._taken += pages
        while self._taken >= BATCH:
            self._taken -= BATCH
            self._free.release()
