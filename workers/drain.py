"""One bit of memory that the main process and its forks share: the worker is shutting down."""

from __future__ import annotations

import mmap

# Anonymous and shared: made before the forks, seen by all of them, gone with the last.
_flag = mmap.mmap(-1, 1)


def begin() -> None:
    """Tell the forks to let go of their runs. Safe in a signal handler."""
    _flag[0] = 1


def has_begun() -> bool:
    return _flag[0] == 1
