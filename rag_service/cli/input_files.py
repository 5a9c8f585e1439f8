"""Which files a command line means: files as named, folders by what is in them.

Used by ingest and run.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rag_service.errors import Unreadable

EXTENSIONS = frozenset({".pdf", ".png", ".jpg", ".jpeg", ".tif", ".tiff", ".webp"})


@dataclass(frozen=True, slots=True)
class RefusedFile:
    """A file or folder that was meant and cannot be read."""

    path: Path
    error: Unreadable


@dataclass(frozen=True, slots=True)
class Found:
    """What the paths of a command line hold."""

    files: list[Path] = field(default_factory=list)
    refused: list[RefusedFile] = field(default_factory=list)
    # Neither a PDF nor a picture by their names.
    passed_by: list[Path] = field(default_factory=list)


def find_files(paths: Iterable[Path]) -> Found:
    """Each file once, in the order named; of folders, at any depth and sorted, the known kinds.

    Hidden files and folders inside a folder are not looked at; a file that is named itself is
    taken whatever it is called. Links to folders are not followed, but said to be there.
    """
    found = Found()
    for path in dict.fromkeys(paths):
        for file in _below(path, found) if path.is_dir() else [path]:
            _take(file, found)
    return Found(list(dict.fromkeys(found.files)), found.refused, found.passed_by)


def require_regular(path: Path) -> None:
    """Raise Unreadable for what is no file: opening a pipe would wait for ever."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise unreadable(error) from error
    if not stat.S_ISREG(mode):
        raise Unreadable("This is not a regular file.")


def unreadable(error: OSError) -> Unreadable:
    """The system's reason as ours."""
    return Unreadable(f"Cannot be read: {error.strerror}.")


def _take(path: Path, found: Found) -> None:
    try:
        require_regular(path)
        found.files.append(path)
    except Unreadable as error:
        found.refused.append(RefusedFile(path, error))


def _below(top: Path, found: Found) -> Iterator[Path]:
    """The known kinds; the others, and what cannot be looked into, are noted on the way."""

    def refuse(error: OSError) -> None:
        found.refused.append(RefusedFile(Path(error.filename), unreadable(error)))

    for folder, below, names in os.walk(top, onerror=refuse):
        below[:] = sorted(name for name in below if not name.startswith("."))
        found.passed_by.extend(p for name in below if (p := Path(folder, name)).is_symlink())
        for name in sorted(names):
            if name.startswith("."):
                continue
            file = Path(folder, name)
            if file.suffix.lower() in EXTENSIONS:
                yield file
            else:
                found.passed_by.append(file)
