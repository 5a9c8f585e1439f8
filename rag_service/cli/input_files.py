"""Finds the files that the paths of a command line mean, also inside folders."""

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
    """A file or folder that cannot be read."""

    path: Path
    error: Unreadable


@dataclass(frozen=True, slots=True)
class Found:
    """The files found, those refused and those skipped."""

    files: list[Path] = field(default_factory=list)
    refused: list[RefusedFile] = field(default_factory=list)
    # By their names neither PDFs nor images; and links to folders.
    skipped: list[Path] = field(default_factory=list)


def find_files(paths: Iterable[Path]) -> Found:
    """Return each file once, in order; from folders the known types, sorted, at any depth.

    Hidden files and folders inside a folder are ignored. A file given by its own path is taken
    whatever its name. Links to folders are not followed; they are listed as skipped.
    """
    found = Found()
    for path in dict.fromkeys(paths):
        for file in _below(path, found) if path.is_dir() else [path]:
            _take(file, found)
    return Found(list(dict.fromkeys(found.files)), found.refused, found.skipped)


def require_regular(path: Path) -> None:
    """Raise Unreadable if this is not a regular file: opening a pipe could wait forever."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise unreadable(error) from error
    if not stat.S_ISREG(mode):
        raise Unreadable("This is not a regular file.")


def unreadable(error: OSError) -> Unreadable:
    """Return an Unreadable with the operating system's reason."""
    return Unreadable(f"Cannot be read: {error.strerror}.")


def _take(path: Path, found: Found) -> None:
    try:
        require_regular(path)
        found.files.append(path)
    except Unreadable as error:
        found.refused.append(RefusedFile(path, error))


def _below(top: Path, found: Found) -> Iterator[Path]:
    """Yield the files of known types; add the others and unreadable folders to `found`."""

    def refuse(error: OSError) -> None:
        found.refused.append(RefusedFile(Path(error.filename), unreadable(error)))

    for folder, below, names in os.walk(top, onerror=refuse):
        below[:] = sorted(name for name in below if not name.startswith("."))
        found.skipped.extend(p for name in below if (p := Path(folder, name)).is_symlink())
        for name in sorted(names):
            if name.startswith("."):
                continue
            file = Path(folder, name)
            if file.suffix.lower() in EXTENSIONS:
                yield file
            else:
                found.skipped.append(file)
