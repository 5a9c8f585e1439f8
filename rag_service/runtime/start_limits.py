"""The system's limits for a long-running process, checked when it starts.

With too little of something it would start and then fail at its first document.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from pathlib import Path

from rag_service.errors import ConfigurationError
from rag_service.runtime.memory import available_mib
from rag_service.runtime.process_resources import find_shortage

# A process with a busy pool of connections opens about 150 files.
_LEAST_FILES, _WANTED_FILES = 256, 4096
# The processes of a small service have about 100 threads together.
_LEAST_TASKS = 128
_LEAST_MEMORY_MIB = 256
_LEAST_SCRATCH_MIB = 64
_LEAST_ADDRESS_SPACE_MIB = 2048
_MIB = 1 << 20
_PIDS = Path("/sys/fs/cgroup/pids.max"), Path("/sys/fs/cgroup/pids.current")


def require_start_limits() -> None:
    """Raise the soft limit on open files; raise ConfigurationError if a limit is too low."""
    problem = _files() or _tasks() or _address_space() or _memory() or _scratch() or find_shortage()
    if problem is not None:
        raise ConfigurationError(f"This process cannot work here: {problem}")


def _files() -> str | None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _is_below(soft, _WANTED_FILES):
        soft = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft >= _LEAST_FILES or soft == resource.RLIM_INFINITY:
        return None
    return (
        f"it may open {soft} files at once, and at least {_LEAST_FILES} are needed. Raise the "
        f"limit: ulimit -n {_WANTED_FILES}, LimitNOFILE= of systemd, or `ulimits` of compose."
    )


def _tasks() -> str | None:
    free = [limit for limit in (_user_tasks(), _group_tasks()) if limit is not None]
    if not free or min(free) >= _LEAST_TASKS:
        return None
    return (
        f"it may have {min(free)} processes and threads more, and at least {_LEAST_TASKS} are "
        "needed. Raise the limit: ulimit -u, TasksMax= of systemd, or `pids_limit` of compose."
    )


def _user_tasks() -> int | None:
    """Return the limit of processes and threads of this user; root has none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    return None if os.geteuid() == 0 or soft == resource.RLIM_INFINITY else soft


def _group_tasks() -> int | None:
    """Return how many processes and threads this container may still start, or None."""
    try:
        most, current = (path.read_text().strip() for path in _PIDS)
        return int(most) - int(current)
    except (OSError, ValueError):
        # No cgroup of version 2, or "max".
        return None


def _address_space() -> str | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if not _is_below(soft, _LEAST_ADDRESS_SPACE_MIB * _MIB):
        return None
    return (
        f"its address space is limited to {soft // _MIB} MiB, and at least "
        f"{_LEAST_ADDRESS_SPACE_MIB} MiB are needed. Raise the limit: ulimit -v unlimited."
    )


def _memory() -> str | None:
    available = available_mib()
    if available is None or available >= _LEAST_MEMORY_MIB:
        return None
    return (
        f"{available} MiB of memory are available, and at least {_LEAST_MEMORY_MIB} MiB are "
        "needed. End other programs, or use a machine with more memory."
    )


def _scratch() -> str | None:
    try:
        folder = tempfile.gettempdir()
    except OSError as error:
        return f"no temporary file can be written: {error.strerror}. Free space, or set TMPDIR."
    free = shutil.disk_usage(folder).free // _MIB
    if free >= _LEAST_SCRATCH_MIB:
        return None
    return (
        f"{folder} has {free} MiB free for temporary files, and at least {_LEAST_SCRATCH_MIB} MiB "
        "are needed. Free space, or set TMPDIR to another folder."
    )


def _is_below(limit: int, least: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < least
