"""An event loop whose clock jumps to the next timer, so that an hour takes seconds.

Nothing in it may wait for sockets, threads or other processes.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time stands still while anything is ready to run, and then jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual = 0.0

    def time(self) -> float:
        return self._virtual

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled  # type: ignore[attr-defined]
        # The loop drops cancelled timers before it waits, and would then wait for the next one in
        # real time.
        while scheduled and scheduled[0].cancelled():
            heapq.heappop(scheduled)._scheduled = False
            self._timer_cancelled_count -= 1
        if not ready and scheduled:
            self._virtual = max(self._virtual, scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


def run(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work, run in virtual time from 0."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
