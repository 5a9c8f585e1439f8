"""Free space of the disks that the service writes to, and which of them runs low."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from rag_service.config.options import Settings

_GIB = 1 << 30
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
    """Yield a sentence for each disk with less free space than storage.min_free_bytes."""
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
