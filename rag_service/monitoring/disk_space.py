"""Free space of the disks that the service writes to, and which of them runs low."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rag_service.config.options import Settings

_GIB = 1 << 30
# A disk without free inodes is full too. Fewer are low, if the file system counts them.
_LEAST_INODES = 10_000
DOCUMENTS = "documents"
DATA = "data"


def free_bytes(settings: Settings, incoming: Path | None) -> Mapping[str, int]:
    """Return the free bytes for uploads and documents, and for the rest of the data folder.

    `incoming`: the folder for uploads, None while the document store cannot be reached: it may
    hang, so it is not touched here then.
    """
    folders = {DATA: settings.data_dir, **({DOCUMENTS: incoming} if incoming else {})}
    return {name: free for name, folder in folders.items() if (free := _free(folder)) is not None}


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def low_disks(settings: Settings, incoming: Path | None) -> Iterator[str]:
    """Yield a sentence for each disk that is short of space (storage.min_free_bytes) or inodes."""
    yield from _few_inodes({settings.data_dir, *([incoming] if incoming else [])})
    least = settings.storage.min_free_bytes
    folders = {DATA: settings.data_dir, DOCUMENTS: incoming}
    shown: set[int] = set()
    for name, free in free_bytes(settings, incoming).items():
        # Both folders may be on one disk.
        if free < least and free not in shown:
            shown.add(free)
            yield (
                f"{free / _GIB:.1f} GiB are free in {folders[name]}, less than "
                f"storage.min_free_bytes ({least / _GIB:.1f} GiB). When the disk is full, uploads "
                "and pages cannot be stored: free some space or enlarge it."
            )


def _few_inodes(folders: Iterable[Path]) -> Iterator[str]:
    shown: set[int] = set()
    for folder in sorted(folders):
        try:
            disk = os.statvfs(folder)
        except OSError:
            continue
        # File systems that make inodes as they need them report none.
        if disk.f_files and disk.f_favail < _LEAST_INODES and disk.f_fsid not in shown:
            shown.add(disk.f_fsid)
            yield (
                f"Only {disk.f_favail} more files fit on the disk of {folder}: its inodes are in "
                "use. When none is left, uploads and pages cannot be stored, although space is "
                "free: delete small files or use a disk with more inodes."
            )
