"""The render child's main program: `python -m rag_service.pdf.child PARENT_PID LIMITS`.

It binds itself to its parent, its pipe and its memory limit before it loads MuPDF.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
from typing import BinaryIO

from rag_service.pdf.child_limits import ChildLimits
from rag_service.runtime.bounded_child import die_with, lower_limit

MIB = 1 << 20
# MiB of address space, plus a multiple of the size at which the child is replaced: libraries,
# arenas, and a picture with its copies. Beyond it an allocation fails, not the machine.
ADDRESS_SPACE_BASE, ADDRESS_SPACE_FACTOR = 1024, 3


def main() -> None:
    """Die with the parent, keep stdout for frames alone, load MuPDF, serve."""
    die_with(int(sys.argv[1]))
    limits = ChildLimits(**json.loads(sys.argv[2]))
    answers = _take_stdout()
    _bound_memory(limits)
    # Imported late: no library may write to the pipe on stdout or allocate without a limit.
    from rag_service.pdf.child.request_handler import RequestHandler

    # Pages consist of thousands of small objects without cycles: collecting them costs 10 %.
    gc.freeze()
    gc.set_threshold(100_000)
    RequestHandler(answers, limits).serve(sys.stdin.buffer)


def _take_stdout() -> BinaryIO:
    """Return a private handle to the pipe; from now on, what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def _bound_memory(limits: ChildLimits) -> None:
    lower_limit(
        resource.RLIMIT_AS, (ADDRESS_SPACE_BASE + limits.max_mib * ADDRESS_SPACE_FACTOR) * MIB
    )
    # MuPDF is expected to crash on hostile files; no core dump is kept.
    lower_limit(resource.RLIMIT_CORE, 0)


if __name__ == "__main__":
    main()
