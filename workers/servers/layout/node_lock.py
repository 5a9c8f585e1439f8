"""One layout server per node: the one that holds the lock beside the socket serves."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

from rag_service.errors import ConfigurationError
from rag_service.runtime.lock_file import LockFile

log = logging.getLogger(__name__)

_BACKLOG = 1024


class NodeLock:
    """The lock for the socket, held until release() or until this process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        """Wait for the lock, while another server of this node holds it.

        Raises ConfigurationError if the socket's folder cannot be used.
        """
        self._path = path
        lock = path.with_name(path.name + ".lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._lock = LockFile(lock)
            except BlockingIOError:
                log.info("Another layout server serves %s; this one takes over when it ends.", path)
                self._lock = LockFile(lock, wait=True)
        except OSError as error:
            raise ConfigurationError(
                f"layout.socket: {path.parent} cannot be used: {error.strerror}"
            ) from error

    def release(self) -> None:
        """Remove the socket and the lock, so that a clean stop leaves no file."""
        self._path.unlink(missing_ok=True)
        self._lock.release()

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
