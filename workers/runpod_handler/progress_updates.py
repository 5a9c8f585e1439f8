"""Tells RunPod how far a job is, and never once its result may be on the way.

An update that arrives after the result overwrites it (runpod-python#250), so updates are sent one
at a time, end some pages before the job does, and are over before the result is posted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from runpod.http_client import AsyncClientSession
from runpod.serverless.modules.rp_http import send_result

_LAST_WORD_SECONDS = 10.0


class Progress:
    """The number of pages that are missing, as the reader counts it."""

    def __init__(self, pages: int, at_work: Callable[[], int]) -> None:
        """No update is sent once no more pages are missing than may be at work."""
        self._pages = pages
        self._at_work = at_work
        self.missing = pages

    def note(self, missing: int) -> None:
        self.missing = missing

    @property
    def worth_telling(self) -> dict[str, int] | None:
        if self.missing <= self._at_work() or self.missing == self._pages:
            return None
        return {"pages_done": self._pages - self.missing, "pages": self._pages}


@asynccontextmanager
async def told(
    progress: Progress, job: dict[str, Any], every: float
) -> AsyncIterator[Callable[[int], None]]:
    """Send updates while the context lasts; none is on its way when it ends."""
    over = asyncio.Event()
    telling = asyncio.create_task(_tell(progress, job, every, over))
    try:
        yield progress.note
    finally:
        over.set()
        await asyncio.wait({telling}, timeout=_LAST_WORD_SECONDS)
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def _tell(progress: Progress, job: dict[str, Any], every: float, over: asyncio.Event) -> None:
    while not over.is_set():
        try:
            await asyncio.wait_for(over.wait(), every)
        except TimeoutError:
            if news := progress.worth_telling:
                async with AsyncClientSession() as session:
                    await send_result(session, {"status": "IN_PROGRESS", "output": news}, job)
