"""State that a worker's main process and its forks share: its id, its forks, whether it shuts down.

Import it before the forks are made: the shared memory of the shutdown flag is created here.
"""

from __future__ import annotations

import mmap
import os
import socket
import uuid

from rag_service.config.loader import get_settings
from rag_service.states import Stage

# Process ids are reused, in containers at every start; the token makes the id unique.
_HOST = socket.gethostname()
_MAIN_PID = os.getpid()
_TOKEN = uuid.uuid4().hex[:6]
_fork_count = 1
# Anonymous shared memory: every fork sees what the main process writes.
_draining = mmap.mmap(-1, 1)


def worker_id(stage: Stage) -> str:
    """Return the id under which this worker claims runs of a stage."""
    return f"{stage}@{_HOST}:{_MAIN_PID}:{_TOKEN}"


def set_fork_count(count: int) -> None:
    """Store the number of forks. The main process calls it before it forks."""
    global _fork_count
    _fork_count = count


def fork_count() -> int:
    """Return how many forks this worker has."""
    return _fork_count


def ocr_server() -> str | None:
    """Return the URL of the OCR server that this process uses, or None if none is set."""
    return get_settings().page_server


def begin_drain() -> None:
    """Ask the forks to release their runs. Safe in a signal handler."""
    _draining[0] = 1


def is_draining() -> bool:
    """Return whether the worker is shutting down."""
    return _draining[0] == 1
