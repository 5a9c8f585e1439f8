"""Report a job's progress to RunPod, but never when its result may already be posted.

An update that arrives after the result overwrites it (runpod-python#250). So updates are sent one
at a time, stop some pages before the job ends, and are over before the result is posted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from runpod.http_client import AsyncClientSession
from runpod.serverless.modules.rp_http import send_result

_LAST_UPDATE_SECONDS = 10.0


class Progress:
    """The number of pages that are missing."""

    def __init__(self, pages: int, in_progress: Callable[[], int]) -> None:
        """`in_progress` returns how many pages may be read at the same time."""
        self._pages = pages
        self._in_progress = in_progress
        self.missing = pages

    def note(self, missing: int) -> None:
        self.missing = missing

    @property
    def update(self) -> dict[str, int] | None:
        """The update to send; None before the first page and once all missing ones may be read."""
        if self.missing <= self._in_progress() or self.missing == self._pages:
            return None
        return {"pages_done": self._pages - self.missing, "pages": self._pages}


@asynccontextmanager
async def reported(
    progress: Progress, job: dict[str, Any], every: float
) -> AsyncIterator[Callable[[int], None]]:
    """Send updates while the context lasts; when it ends, no update is on its way."""
    over = asyncio.Event()
    updates = asyncio.create_task(_send_updates(progress, job, every, over))
    try:
        yield progress.note
    finally:
        over.set()
        await asyncio.wait({updates}, timeout=_LAST_UPDATE_SECONDS)
        updates.cancel()
        await asyncio.gather(updates, return_exceptions=True)


async def _send_updates(
    progress: Progress, job: dict[str, Any], every: float, over: asyncio.Event
) -> None:
    while not over.is_set():
        try:
            await asyncio.wait_for(over.wait(), every)
        except TimeoutError:
            if update := progress.update:
                async with AsyncClientSession() as session:
                    await send_result(session, {"status": "IN_PROGRESS", "output": update}, job)
