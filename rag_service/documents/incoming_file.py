"""Files received onto the disk, hashed and limited in size while they are written.

They are received inside a document store that is a folder, so that storing one needs no
second copy. An open file is locked; an unlocked one was left by a process that died.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import TracebackType
from typing import BinaryIO

from rag_service.config.options import Settings
from rag_service.documents.folder_store import INCOMING_PREFIX
from rag_service.errors import EmptyFile, StorageUnavailable, TooLarge, UnsupportedType
from rag_service.pdf.media_type import HEAD_BYTES, media_type_of
from rag_service.runtime.clocks import file_system_clock

_CHUNK = 1024 * 1024
# A file system may keep no locks between machines; an upload silent for this long has ended.
_STALE_SECONDS = 900.0


class IncomingFile:
    """A temporary file with its size, sha256 and first bytes; removed when closed.

    Raises StorageUnavailable, with the system's reason, if the disk cannot be written to.
    """

    def __init__(self, settings: Settings, folder: Path) -> None:
        """`folder`: where the document store wants its files; see DocumentStore.incoming()."""
        with _disk_errors():
            # Closed by close(), which also runs at the end of a `with` block.
            self._file = NamedTemporaryFile(  # noqa: SIM115
                dir=folder, prefix=INCOMING_PREFIX, delete=False
            )
        _lock(self._file.fileno())
        self._limit = settings.limits.max_bytes
        self._digest = hashlib.sha256()
        self._head = b""
        self.path = Path(self._file.name)
        self.bytes = 0

    def write(self, chunk: bytes) -> None:
        """Append bytes. Raises TooLarge as soon as the limit is exceeded."""
        self.bytes += len(chunk)
        if self.bytes > self._limit:
            raise TooLarge(f"The file is larger than limits.max_bytes ({self._limit} bytes).")
        if len(self._head) < HEAD_BYTES:
            self._head += chunk[: HEAD_BYTES - len(self._head)]
        self._digest.update(chunk)
        with _disk_errors():
            self._file.write(chunk)

    def copy_from(self, source: BinaryIO) -> None:
        """Append the whole content of a file."""
        while chunk := source.read(_CHUNK):
            self.write(chunk)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def finish(self) -> str:
        """Flush, and return the media type. Raises EmptyFile, UnsupportedType."""
        with _disk_errors():
            self._file.flush()
        if self.bytes == 0:
            raise EmptyFile()
        media_type = media_type_of(self._head)
        if media_type is None:
            raise UnsupportedType()
        return media_type

    def close(self) -> None:
        """Remove the file."""
        # Closing writes buffered bytes, which fails on a full disk; the file is removed anyway.
        with suppress(OSError):
            self._file.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> IncomingFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Turn an OSError, such as a full or read-only disk, into StorageUnavailable."""
    try:
        yield
    except OSError as error:
        raise StorageUnavailable(f"The upload cannot be stored: {error.strerror}.") from error


@contextmanager
def scratch_file(folder: Path) -> Iterator[Path]:
    """Yield the path of an empty file, removed after the block. Raises StorageUnavailable."""
    with _disk_errors():
        file = NamedTemporaryFile(  # noqa: SIM115
            dir=folder, prefix=INCOMING_PREFIX, delete=False
        )
    with file:
        _lock(file.fileno())
        path = Path(file.name)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


def _lock(descriptor: int) -> None:
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_stale(folder: Path) -> int:
    """Remove files that uploads left when their process died. Return their number."""
    found = list(folder.glob(INCOMING_PREFIX + "*"))
    if not found:
        return 0
    with _disk_errors():
        now = file_system_clock(folder)
    return sum(_remove_if_stale(path, now) for path in found)


def _remove_if_stale(path: Path, now: float) -> bool:
    with suppress(OSError), path.open("rb") as file:
        if now - os.fstat(file.fileno()).st_mtime < _STALE_SECONDS:
            return False
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return True
    return False
