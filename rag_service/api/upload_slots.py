"""The uploads that are received at the same time: bounded in all, and for each client address."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rag_service.errors import BacklogFull

# Each open upload has a parser, a file and up to 1 MiB of its body.
_UPLOADS = 64
# One client leaves the rest to others, however many uploads it opens.
_UPLOADS_PER_CLIENT = 48
# A client that gets no slot in this time is asked to come back, before its body is read.
_WAIT_SECONDS = 10.0


class UploadSlots:
    """Slots for uploads. Use it inside one event loop."""

    def __init__(
        self,
        total: int = _UPLOADS,
        per_client: int = _UPLOADS_PER_CLIENT,
        wait_seconds: float = _WAIT_SECONDS,
    ) -> None:
        self._total = total
        self._per_client = per_client
        self._wait_seconds = wait_seconds
        self._open: Counter[str] = Counter()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def slot(self, client: str) -> AsyncIterator[None]:
        """Hold a slot for an upload of this client address.

        Raises BacklogFull if none becomes free in time.
        """
        async with self._changed:
            try:
                async with asyncio.timeout(self._wait_seconds):
                    await self._changed.wait_for(lambda: self._is_free_for(client))
            except TimeoutError:
                raise BacklogFull(self._refusal(client)) from None
            self._open[client] += 1
        try:
            yield
        finally:
            async with self._changed:
                self._open[client] -= 1
                # Without an entry for every address that ever sent something.
                self._open += Counter()
                self._changed.notify_all()

    def _is_free_for(self, client: str) -> bool:
        return self._open.total() < self._total and self._open[client] < self._per_client

    def _refusal(self, client: str) -> str:
        if self._open[client] >= self._per_client:
            return f"{self._open[client]} uploads of this client are open; try again later."
        return f"{self._open.total()} uploads are open; try again later."
