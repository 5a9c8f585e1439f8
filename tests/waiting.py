"""Waits for a condition that another thread or process makes true."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T], seconds: float = 120) -> T:
    """Return the first true value of the condition. Raises AssertionError if none comes in time.

    The limit only ends a broken test: it leaves time for a machine that is busy with other work.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"The condition was not true within {seconds:g} s."
        time.sleep(0.01)
    return value
