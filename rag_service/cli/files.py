"""Which files a command line means: files as named, folders by what is in them. Used by ingest."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

EXTENSIONS = frozenset({".pdf", ".png", ".jpg", ".jpeg", ".tif", ".tiff", ".webp"})


def find_files(paths: Iterable[Path]) -> list[Path]:
    """Each file once, in the order named; of folders, at any depth and sorted, the known kinds.

    Hidden files and folders inside a folder are passed by; a file that is named itself is taken
    whatever it is called.
    """
    found = dict.fromkeys(file for path in paths for file in _files(path))
    return list(found)


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for folder, below, names in os.walk(path):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            if not name.startswith(".") and file.suffix.lower() in EXTENSIONS:
                yield file
