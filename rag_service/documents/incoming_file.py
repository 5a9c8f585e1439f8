"""Files received onto the disk, hashed and limited in size while they are written."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import TracebackType
from typing import BinaryIO

from rag_service.config.options import Settings
from rag_service.errors import EmptyFile, StorageUnavailable, TooLarge, UnsupportedType
from rag_service.pdf.media_type import HEAD_BYTES, media_type_of

_CHUNK = 1024 * 1024
_PREFIX = "upload-"
# No upload takes this long; an older file was left by a crash.
_STALE_SECONDS = 24 * 3600.0


class IncomingFile:
    """A temporary file with its size, sha256 and first bytes; removed when closed.

    Raises StorageUnavailable, with the system's reason, if the disk cannot be written to.
    """

    def __init__(self, settings: Settings) -> None:
        with _disk_errors():
            # Closed by close(), which also runs at the end of a `with` block.
            self._file = NamedTemporaryFile(  # noqa: SIM115
                dir=_incoming(settings), prefix=_PREFIX, delete=False
            )
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
def scratch_file(settings: Settings) -> Iterator[Path]:
    """Yield the path of an empty file, removed after the block. Raises StorageUnavailable."""
    with (
        _disk_errors(),
        NamedTemporaryFile(dir=_incoming(settings), prefix=_PREFIX, delete=False) as file,
    ):
        path = Path(file.name)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def remove_stale(settings: Settings) -> int:
    """Remove files that uploads left when their process died. Return their number."""
    oldest = time.time() - _STALE_SECONDS
    stale = [p for p in _incoming(settings).glob(_PREFIX + "*") if p.stat().st_mtime < oldest]
    for path in stale:
        path.unlink(missing_ok=True)
    return len(stale)


def _incoming(settings: Settings) -> Path:
    folder = settings.data_dir / "incoming"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder
