"""One layout server per node: the one that holds the lock beside the socket serves."""

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
    """The lock for the socket, held until this process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        """Wait for the lock, while another server of this node holds it.

        Raises ConfigurationError if the socket's folder cannot be used.
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
            log.info("Another layout server serves %s; this one takes over when it ends.", path)
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def bind(self) -> socket.socket:
        """Return the socket, open to this user only; the file of a dead server is replaced."""
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            listener.bind(str(self._path))
        finally:
            os.umask(before)
        listener.listen(_BACKLOG)
        return listener
