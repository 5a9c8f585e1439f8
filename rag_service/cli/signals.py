"""Signal handling of `run` and `up`: the first signal stops them in order, the second at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rag_service.cli.output import note

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(SystemExit):
    """Raised by the first signal; its exit status is 128 plus the signal's number."""


@contextmanager
def stop_in_order(force: Callable[[], None]) -> Iterator[None]:
    """Within the context a signal raises Stopped; a second one calls `force` and exits."""
    received: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            force()
            os._exit(128 + number)
        note("Stopping. Press Ctrl-C again to stop at once.")
        raise Stopped(128 + number)

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
