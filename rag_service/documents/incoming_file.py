"""Receives a file onto the disk: hashed and limited while it streams. Used by intake."""

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
# No upload takes this long; what is older was left behind by a crash.
_STALE_SECONDS = 24 * 3600.0


class IncomingFile:
    """A temporary file that knows its size, sha256 and first bytes; gone when closed.

    Raises StorageUnavailable, with the system's reason, where the disk does not take it.
    """

    def __init__(self, settings: Settings) -> None:
        with _disk():
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
        """Append bytes. Raises TooLarge as soon as the limit is passed."""
        self.bytes += len(chunk)
        if self.bytes > self._limit:
            raise TooLarge(f"The file is larger than limits.max_bytes ({self._limit} bytes).")
        if len(self._head) < HEAD_BYTES:
            self._head += chunk[: HEAD_BYTES - len(self._head)]
        self._digest.update(chunk)
        with _disk():
            self._file.write(chunk)

    def copy_from(self, source: BinaryIO) -> None:
        """Append everything a file holds."""
        while chunk := source.read(_CHUNK):
            self.write(chunk)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def finish(self) -> str:
        """Flush, and say the media type. Raises EmptyFile, UnsupportedType."""
        with _disk():
            self._file.flush()
        if self.bytes == 0:
            raise EmptyFile()
        media_type = media_type_of(self._head)
        if media_type is None:
            raise UnsupportedType()
        return media_type

    def close(self) -> None:
        """Remove the file."""
        # Closing writes what is still in hand, which a full disk refuses; it is thrown away.
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
def _disk() -> Iterator[None]:
    """Where the disk is full or read-only, that is no error of ours."""
    try:
        yield
    except OSError as error:
        raise StorageUnavailable(f"The upload cannot be stored: {error.strerror}.") from error


@contextmanager
def scratch_file(settings: Settings) -> Iterator[Path]:
    """An empty file beside the uploads, gone after the block. Raises StorageUnavailable."""
    with (
        _disk(),
        NamedTemporaryFile(dir=_incoming(settings), prefix=_PREFIX, delete=False) as file,
    ):
        path = Path(file.name)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def remove_stale(settings: Settings) -> int:
    """Remove files that uploads left behind when their process died; how many."""
    oldest = time.time() - _STALE_SECONDS
    stale = [p for p in _incoming(settings).glob(_PREFIX + "*") if p.stat().st_mtime < oldest]
    for path in stale:
        path.unlink(missing_ok=True)
    return len(stale)


def _incoming(settings: Settings) -> Path:
    folder = settings.data_dir / "incoming"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder
