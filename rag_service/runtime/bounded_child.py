"""Limits of a child process: it dies with its parent and stays within bounds.

Standard library alone, since ghostscript.py runs this file as a script:
`python -I -S bounded_child.py PARENT_PID FILE_BYTES MEMORY_BYTES PROGRAM ARG…`. The memory is
address space; an allocation beyond it fails.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1
NICE = 10

# Loaded at import: after a fork in a process with threads, loading may wait for a lock forever.
_prctl = None
if sys.platform == "linux":
    _prctl = ctypes.CDLL(None).prctl
    _prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)


def main() -> None:
    """Set the limits, then replace this process by the program."""
    parent, file_bytes, memory_bytes = map(int, sys.argv[1:4])
    die_with(parent)
    os.nice(NICE)
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        lower_limit(limit, value)
    # Python ignores SIGXFSZ, and the program would inherit that.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.execv(sys.argv[4], sys.argv[4:])


def die_with(parent: int, death_signal: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that started it ends (Linux).

    Ends this process at once if the parent is already dead.
    """
    set_process_option(PR_SET_PDEATHSIG, int(death_signal))
    # The parent may have died before that call.
    if os.getppid() != parent:
        os._exit(1)


def set_process_option(option: int, value: int) -> None:
    """Call prctl(2); on other systems than Linux do nothing."""
    if _prctl is not None:
        _prctl(option, value, 0, 0, 0)


def lower_limit(limit: int, value: int) -> None:
    """Set a resource limit, unless a lower one is set already."""
    _, hard = resource.getrlimit(limit)
    if hard == resource.RLIM_INFINITY or value < hard:
        resource.setrlimit(limit, (value, hard))


if __name__ == "__main__":
    main()
