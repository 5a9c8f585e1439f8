"""The render child's process: bound to its parent, its pipe and its memory, before MuPDF loads.

Started by process.py as `python -m rag_service.pdf.child PARENT_PID LIMITS`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import sys
from typing import BinaryIO

from rag_service.pdf.limits import ChildLimits

PR_SET_PDEATHSIG = 1
MIB = 1 << 20
# Address space is larger than memory: libraries and arenas, and a picture with its copies on top
# of the size at which the child is replaced. Beyond it an allocation fails, not the machine.
ADDRESS_SPACE_BASE, ADDRESS_SPACE_FACTOR = 1024, 3


def main() -> None:
    """Bind to the parent, keep stdout for frames alone, load MuPDF, serve."""
    _die_with(int(sys.argv[1]))
    limits = ChildLimits(**json.loads(sys.argv[2]))
    answers = _take_stdout()
    _bound_memory(limits)
    # Only now: nothing that loads may find the pipe on stdout or allocate without bound.
    from rag_service.pdf.service import Service

    # Pages are built of thousands of small objects without cycles: looking for some costs 10 %.
    gc.freeze()
    gc.set_threshold(100_000)
    Service(answers, limits).serve(sys.stdin.buffer)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before that call.
    if os.getppid() != parent:
        sys.exit(1)


def _take_stdout() -> BinaryIO:
    """A private handle to the pipe; whatever a library prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def _bound_memory(limits: ChildLimits) -> None:
    most = (ADDRESS_SPACE_BASE + limits.max_mib * ADDRESS_SPACE_FACTOR) * MIB
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    # A crash of MuPDF on a hostile file is an expected event, not one to keep a dump of.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
