"""How `run` and `up` end: the first signal stops them in order, the second at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rag_service.cli.output import note

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(SystemExit):
    """A signal asks us to stop; the exit status is the shell's for it."""


@contextmanager
def stop_in_order(force: Callable[[], None]) -> Iterator[None]:
    """Inside, a signal raises Stopped; a second one calls `force` and ends the process."""
    received: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            force()
            os._exit(128 + number)
        note("Stopping; once more stops at once.")
        raise Stopped(128 + number)

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
