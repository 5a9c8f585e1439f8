"""One layout server a node: who holds the lock beside the socket serves. Used by layout_server."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from pathlib import Path

from rag_service.errors import ConfigurationError

log = logging.getLogger(__name__)

_BACKLOG = 1024


class NodeLock:
    """The right to the socket, from the lock until this process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        """Wait for the lock: at once the only server, or the next where one serves already.

        Raises ConfigurationError where the socket's folder cannot be used.
        """
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigurationError(
                f"layout.socket: {path.parent} cannot be used: {error.strerror}"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("A layout server serves %s already; this one takes over after it.", path)
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def bind(self) -> socket.socket:
        """The socket, open to our own user alone; a dead server's file gives way."""
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            listener.bind(str(self._path))
        finally:
            os.umask(before)
        listener.listen(_BACKLOG)
        return listener
