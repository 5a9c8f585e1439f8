"""The cost of processes and all their children: CPU so far, memory now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import psutil

MIB = 1 << 20
KIB = 1 << 10


def family(pids: Iterable[int]) -> Iterator[psutil.Process]:
    """The processes and their living descendants."""
    for pid in pids:
        try:
            process = psutil.Process(pid)
            yield process
            yield from process.children(recursive=True)
        except psutil.NoSuchProcess:
            continue


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of the trees, of descendants that have ended and were waited for too."""
    total = 0.0
    for process in family(pids):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def memory_mib(trees: Mapping[str, Iterable[int]]) -> dict[str, float]:
    """Proportional set size of each tree: a page that its processes share is counted once."""
    members = {name: [process.pid for process in family(pids)] for name, pids in trees.items()}
    # Adding up a process's pages takes milliseconds, and it may stand in several trees.
    sizes = {pid: _pss(pid) for pid in {pid for pids in members.values() for pid in pids}}
    return {name: sum(sizes[pid] for pid in pids) / MIB for name, pids in members.items()}


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    sizes = (line.split()[1] for line in lines if line.startswith("Pss:"))
    return sum(int(size) for size in sizes) * KIB
