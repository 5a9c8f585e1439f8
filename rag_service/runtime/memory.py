"""Whether this machine has memory for more work. Used by ocr workers and the limiter.

Where a GPU shares the machine's memory, too much work at once brings the whole machine down.
"""

from __future__ import annotations

from pathlib import Path

from rag_service.config.options import Settings

_MEMINFO = Path("/proc/meminfo")


def has_room(settings: Settings) -> bool:
    """False while the memory guard is on and less than its least is available."""
    guard = settings.memory_guard
    if not guard.enabled:
        return True
    available = available_mib()
    return available is None or available >= guard.min_available_mib


def available_mib() -> int | None:
    """What new work can have without swapping, in MiB; None where the system does not say.

    Linux's MemAvailable, which in a container too is the whole machine's.
    """
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return int(found.split()[1]) // 1024 if found else None
