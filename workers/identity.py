"""Who this worker is: an identity its forks share, made before they are. Used by all of workers."""

from __future__ import annotations

import os
import socket
import uuid

from rag_service.config.loader import get_settings
from rag_service.states import Stage

# Process ids come again, in containers always; the token makes each start a worker of its own.
_HOST = socket.gethostname()
_MAIN_PID = os.getpid()
_TOKEN = uuid.uuid4().hex[:6]
_forks = 1


def worker_id(stage: Stage) -> str:
    """The name that a worker's claims of a stage carry."""
    return f"{stage}@{_HOST}:{_MAIN_PID}:{_TOKEN}"


def set_forks(count: int) -> None:
    """Told by the main process before it forks."""
    global _forks
    _forks = count


def forks() -> int:
    """How many forks this worker has."""
    return _forks


def ocr_server() -> str | None:
    """Return the URL of the OCR server that this process uses, or None if none is set."""
    return get_settings().page_server
