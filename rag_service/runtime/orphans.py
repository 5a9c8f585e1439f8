"""Reaps processes whose parent died: without a real init process they stay as zombies.

A killed fork's render child dies with it, and then belongs to the next process above.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

import psutil

from rag_service.runtime.bounded_child import set_process_option

# linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.02


class OrphanReaper:
    """Makes this process the parent of orphans below it, and reaps those that have ended.

    A child of this process's own is left to its owner, who reaps it sooner than the second look.
    """

    def __init__(self) -> None:
        set_process_option(_PR_SET_CHILD_SUBREAPER, 1)
        self._seen: set[int] = set()

    def reap(self) -> None:
        """Reap every child that was a zombie at the last call too. Call it every few seconds."""
        zombies = {child.pid for child in psutil.Process().children() if _is_zombie(child)}
        for pid in zombies & self._seen:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._seen = zombies

    def reap_all(self, seconds: float) -> None:
        """Reap all children that end in this time. Call it when this process is about to end."""
        deadline = time.monotonic() + seconds
        with suppress(ChildProcessError):
            while time.monotonic() < deadline:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    time.sleep(_POLL_SECONDS)


def _is_zombie(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return False
