"""A lock file that its last owner removes: no file is left after a clean stop."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


class LockFile:
    """An exclusive lock on a path. The kernel releases it when the owner ends, however it ends."""

    def __init__(self, path: Path, *, wait: bool = False) -> None:
        """Take the lock, or wait for it. Raises OSError; BlockingIOError if it is taken."""
        self._path = path
        self._file: int | None = None
        flags = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
        while self._file is None:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(file, flags)
                # The last owner may have removed the file in between: then it locks nothing.
                if _is_at(file, path):
                    self._file = file
            finally:
                if self._file is None:
                    os.close(file)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Remove the file and release the lock. A second call does nothing."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None


def owner_of(path: Path) -> str:
    """Return the process ID in a lock file, or an empty text."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")[:20].strip()
    return ""


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
