"""Clocks other than the database's. A row's time is compared in SQL, by the database's clock alone.

The clocks of two machines may differ by minutes, and one that is set jumps. So no time of another
machine is compared with this machine's.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from tempfile import TemporaryFile

_OFFSET = time.time() - time.monotonic()


def steady_wall_clock() -> float:
    """Return the seconds since 1970 as of this program's start, and steady since then.

    The same for all forks of a worker. It does not jump when the machine's clock is set.
    """
    return _OFFSET + time.monotonic()


def file_system_clock(folder: Path) -> float:
    """Return the time that a file written in the folder gets now; another machine may keep it.

    Raises OSError if no file can be written there.
    """
    with TemporaryFile(dir=folder, buffering=0) as file:
        file.write(b"x")
        return os.fstat(file.fileno()).st_mtime
