"""The render child's process: bound to its parent, its pipe and its memory, before MuPDF loads.

Started by process.py as `python -m rag_service.pdf.child PARENT_PID LIMITS`.
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
# Address space is larger than memory: libraries and arenas, and a picture with its copies on top
# of the size at which the child is replaced. Beyond it an allocation fails, not the machine.
ADDRESS_SPACE_BASE, ADDRESS_SPACE_FACTOR = 1024, 3


def main() -> None:
    """Die with the parent, keep stdout for frames alone, load MuPDF, serve."""
    die_with(int(sys.argv[1]))
    limits = ChildLimits(**json.loads(sys.argv[2]))
    answers = _take_stdout()
    _bound_memory(limits)
    # Only now: nothing that loads may find the pipe on stdout or allocate without bound.
    from rag_service.pdf.child.request_handler import Service

    # Pages are built of thousands of small objects without cycles: looking for some costs 10 %.
    gc.freeze()
    gc.set_threshold(100_000)
    Service(answers, limits).serve(sys.stdin.buffer)


def _take_stdout() -> BinaryIO:
    """A private handle to the pipe; whatever a library prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def _bound_memory(limits: ChildLimits) -> None:
    lower_limit(
        resource.RLIMIT_AS, (ADDRESS_SPACE_BASE + limits.max_mib * ADDRESS_SPACE_FACTOR) * MIB
    )
    # A crash of MuPDF on a hostile file is an expected event, not one to keep a dump of.
    lower_limit(resource.RLIMIT_CORE, 0)


if __name__ == "__main__":
    main()
