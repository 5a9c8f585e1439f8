"""Shows the children's log files as they grow, each line with its program's name."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

_POLL_SECONDS = 0.3


class LogFollower:
    """Context manager whose thread copies what is appended to each NAME.log to stderr."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self._tails = [_Tail(name, folder / f"{name}.log") for name in names]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="logs", daemon=True)

    def __enter__(self) -> LogFollower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _follow(self) -> None:
        while True:
            last = self._stop.wait(_POLL_SECONDS)
            for tail in self._tails:
                tail.copy()
            sys.stderr.flush()
            if last:
                return


class _Tail:
    """Copies the whole lines that are appended to one file, also after a rotation."""

    def __init__(self, name: str, path: Path) -> None:
        self._prefix = f"{name:<14} | "
        self._path = path
        self._file = path.open("rb") if path.exists() else None
        if self._file is not None:
            self._file.seek(0, 2)
        self._rest = b""

    def copy(self) -> None:
        """Copy the lines that were appended since the last call."""
        if self._file is not None:
            self._write(self._file.read())
        if not self._path.exists():
            return
        if self._file is None or not os.path.samestat(
            os.fstat(self._file.fileno()), self._path.stat()
        ):
            self._reopen()

    def _reopen(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._path.open("rb")
        self._write(self._file.read())

    def _write(self, new: bytes) -> None:
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            sys.stderr.write(f"{self._prefix}{line.decode(errors='replace')}\n")
