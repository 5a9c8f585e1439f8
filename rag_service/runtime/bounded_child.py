"""Runs a program that dies with its parent and stays within bounds. Standard library alone.

ghostscript.py starts this file as a script: `python leash.py PARENT_PID FILE_BYTES PROGRAM ARG…`;
the render child takes die_with from it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1
NICE = 10
# Far more than a page needs; a hostile picture gets an error instead of the machine's memory.
ADDRESS_SPACE = 4 << 30


def main() -> None:
    """Bind to the parent, give way to other processes, become the program."""
    parent, file_bytes, program = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    die_with(parent)
    os.nice(NICE)
    for limit, most in (
        (resource.RLIMIT_AS, ADDRESS_SPACE),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        lower(limit, most)
    # Python ignores this one, and what is ignored stays so in the program.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.execv(program, sys.argv[3:])


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before that call.
    if os.getppid() != parent:
        sys.exit(1)


def lower(limit: int, most: int) -> None:
    """Set a resource limit, unless a lower one holds already."""
    _, hard = resource.getrlimit(limit)
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(limit, (most, hard))


if __name__ == "__main__":
    main()
