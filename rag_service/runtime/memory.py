"""Whether this machine has memory for more work.

On a machine whose GPU shares the main memory, too much work at once can stop the whole machine.
"""

from __future__ import annotations

from pathlib import Path

from rag_service.config.options import Settings

_MEMINFO = Path("/proc/meminfo")


def has_enough_memory(settings: Settings) -> bool:
    """Return False if the memory guard is on and less than its minimum is available."""
    guard = settings.memory_guard
    if not guard.enabled:
        return True
    available = available_mib()
    return available is None or available >= guard.min_available_mib


def available_mib() -> int | None:
    """Return the MiB that new work can use without swapping, or None if the system has no figure.

    This is Linux's MemAvailable, which is the whole machine's also inside a container.
    """
    return _meminfo_mib("MemAvailable")


def machine_mib() -> int | None:
    """Return the MiB of memory of the whole machine, or None if the system has no figure."""
    return _meminfo_mib("MemTotal")


def _meminfo_mib(name: str) -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith(f"{name}:")), None)
    return int(found.split()[1]) // 1024 if found else None
