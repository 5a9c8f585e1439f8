"""Refuses new threads, as the system does at its limit, in processes named by a file.

For PYTHONPATH of a worker: root, as which tests may run, is not bound by RLIMIT_NPROC.
"""

import os
import threading
from pathlib import Path

_start = threading.Thread.start


def _refuse_or_start(thread: threading.Thread) -> None:
    if Path(os.environ["REFUSED_THREADS"], str(os.getpid())).exists():
        raise RuntimeError("can't start new thread")
    _start(thread)


threading.Thread.start = _refuse_or_start  # type: ignore[method-assign]
