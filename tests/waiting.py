"""Waiting for what must happen soon: used by every test whose subject runs in another thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T], seconds: float = 30) -> T:
    """The first true value of the condition; AssertionError where none comes in time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"Not in {seconds:g} s."
        time.sleep(0.01)
    return value
