"""The render child's main program: `python -m rag_service.pdf.child PARENT_PID LIMITS`.

It binds itself to its parent and its pipe before it loads MuPDF, and to its memory limit before it
reads a file.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
from pathlib import Path
from typing import BinaryIO

from rag_service.pdf.child_limits import ChildLimits
from rag_service.runtime.bounded_child import die_with, lower_limit

MIB = 1 << 20
# MiB of address space while the modules are loaded.
LOADING_MIB = 1024


def main() -> None:
    """Die with the parent, keep stdout for frames alone, load MuPDF, serve."""
    die_with(int(sys.argv[1]))
    limits = ChildLimits(**json.loads(sys.argv[2]))
    answers = _take_stdout()
    # MuPDF is expected to crash on hostile files; no core dump is kept.
    lower_limit(resource.RLIMIT_CORE, 0)
    lower_limit(resource.RLIMIT_AS, LOADING_MIB * MIB)
    # Imported late: no library may write to the pipe on stdout or allocate without a limit.
    from rag_service.pdf.child.request_handler import RequestHandler

    # Pages consist of thousands of small objects without cycles: collecting them costs 10 %.
    gc.freeze()
    gc.set_threshold(100_000)
    _bound_memory(limits.max_mib)
    RequestHandler(answers, limits).serve(sys.stdin.buffer)


def _take_stdout() -> BinaryIO:
    """Return a private handle to the pipe; from now on, what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def _bound_memory(max_mib: int) -> None:
    """Let the resident memory grow to `max_mib`; beyond it an allocation fails, not the machine.

    The kernel bounds the address space only, part of which, code for example, is never resident.
    """
    size, resident = map(int, Path("/proc/self/statm").read_text().split()[:2])
    untouched = (size - resident) * os.sysconf("SC_PAGE_SIZE")
    lower_limit(resource.RLIMIT_AS, untouched + max_mib * MIB)


if __name__ == "__main__":
    main()
