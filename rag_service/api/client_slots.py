"""Slots for what is open at the same time: bounded in all, and for each client address."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rag_service.errors import RequestError


class ClientSlots:
    """Slots for one kind of request. Use it inside one event loop."""

    def __init__(
        self,
        kind: str,
        refusal: type[RequestError],
        *,
        total: int,
        per_client: int,
        wait_seconds: float,
    ) -> None:
        """`kind`: a plural for messages. A client leaves the rest of `total` to others.

        `refusal`: raised if no slot becomes free in `wait_seconds`.
        """
        self._kind = kind
        self._refusal = refusal
        self._total = total
        self._per_client = per_client
        self._wait_seconds = wait_seconds
        self._open: Counter[str] = Counter()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def slot(self, client: str) -> AsyncIterator[None]:
        """Hold a slot for this client address. Raises the refusal."""
        try:
            async with asyncio.timeout(self._wait_seconds):
                while not self._is_free_for(client):
                    await self._freed.wait()
        except TimeoutError:
            raise self._refusal(self._reason(client)) from None
        self._open[client] += 1
        try:
            yield
        finally:
            self._open[client] -= 1
            # Without an entry for every address that ever sent something.
            self._open += Counter()
            self._freed.set()
            self._freed = asyncio.Event()

    def _is_free_for(self, client: str) -> bool:
        return self._open.total() < self._total and self._open[client] < self._per_client

    def _reason(self, client: str) -> str:
        if self._open[client] >= self._per_client:
            return f"{self._open[client]} {self._kind} of this client are open; try again later."
        return f"{self._open.total()} {self._kind} are open; try again later."
