"""Document bytes in a folder.

Each operation reads the marker and works in the same open folder, so bytes never go into the
folder below an unmounted file system. A file reaches its key by a rename, after it is on the disk.
Other users of the machine cannot enter the folder, whatever mode it had before.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from rag_service.documents.byte_store import (
    HEALTH_KEY,
    MARKER,
    changed_bytes,
    marker_id,
    marker_text,
    require_marker,
)
from rag_service.errors import SourceMissing, StorageUnavailable, StoreUnreachable

log = logging.getLogger(__name__)

INCOMING = "incoming"
INCOMING_PREFIX = "upload-"
_MARKER_BYTES = 4096
_OTHER_USERS = 0o077
_MISSING = (FileNotFoundError, NotADirectoryError)
# Files whose sha256 this process has checked.
_MOST_CHECKED = 10_000


class FolderStore:
    """A ByteStore in a folder of this machine or of a mounted file system."""

    def __init__(self, folder: Path) -> None:
        self.store_id: str | None = None
        self._folder = folder
        self._checked: set[tuple[str, int, int, int]] = set()
        self._warned = False

    @property
    def place(self) -> str:
        return str(self._folder)

    @property
    def marker_place(self) -> str:
        return str(self._folder / MARKER)

    def read_marker(self) -> str | None:
        try:
            with _opened_folder(self._folder) as root:
                return _read_marker(root)
        except _MISSING:
            return None
        except OSError as error:
            raise self._unreachable(error) from error

    def create(self, store_id: str) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _opened_folder(self._folder) as root:
                _write(root, MARKER, marker_text(store_id).encode())
                os.fsync(root)
        except OSError as error:
            raise self._unreachable(error) from error

    def contains(self, key: str) -> bool:
        with suppress(*_MISSING), self._named_errors():
            return (self._folder / key).is_file()
        return False

    def put(self, key: str, path: Path) -> None:
        """Link the file to the key if the store is on the same file system, else copy it."""
        temporary = f"{INCOMING}/{INCOMING_PREFIX}{secrets.token_hex(8)}"
        with self._opened() as root, self._named_errors():
            _make_folders(root, temporary)
            try:
                _link_or_copy(path, temporary, root)
                _make_folders(root, key)
                os.replace(temporary, key, src_dir_fd=root, dst_dir_fd=root)
                _flush(root, str(PurePosixPath(key).parent))
            finally:
                # Still there after an error, and if both names were links to one file.
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=root)

    @contextmanager
    def open_local(self, key: str, sha256: str | None) -> Iterator[Path]:
        with self._opened() as root, self._named_errors():
            found = _stat(root, key)
            identity = (key, found.st_ino, found.st_size, found.st_mtime_ns)
            if sha256 is not None and identity not in self._checked:
                if _sha256(root, key) != sha256:
                    raise changed_bytes(key, found.st_size)
                if len(self._checked) >= _MOST_CHECKED:
                    self._checked.clear()
                self._checked.add(identity)
        yield self._folder / key

    def size(self, key: str) -> int:
        with self._opened() as root, self._named_errors():
            return _stat(root, key).st_size

    def delete(self, key: str) -> None:
        with self._opened() as root, self._named_errors(), suppress(FileNotFoundError):
            self._remove_leftovers(root, key)
            os.unlink(key, dir_fd=root)

    def require(self) -> None:
        with self._opened():
            return

    def check(self) -> None:
        with self._opened() as root, self._named_errors():
            _write(root, HEALTH_KEY, b"ok")

    def check_place(self) -> None:
        """Check that the folder, or its nearest ancestor if it is missing, can be written to."""
        nearest = self._folder
        try:
            while not nearest.exists() and nearest != nearest.parent:
                nearest = nearest.parent
            if not nearest.is_dir():
                raise StorageUnavailable(f"{self._folder}: {nearest} is not a folder.")
            if nearest != self._folder:
                # Permissions do not say everything, for example below /proc.
                Path(tempfile.mkdtemp(dir=nearest)).rmdir()
            elif not os.access(nearest, os.W_OK | os.X_OK):
                raise StorageUnavailable(f"{self._folder}: it cannot be written to.")
        except OSError as error:
            raise StorageUnavailable(f"{self._folder}: {error.strerror}.") from error

    def incoming(self) -> Path:
        """Return a folder inside the store, so that a file is put without copying it."""
        with self._opened() as root, self._named_errors():
            _make_folders(root, f"{INCOMING}/x")
        return self._folder / INCOMING

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Yield a descriptor of the folder that has the right marker."""
        try:
            root = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        except _MISSING:
            require_marker(self, None)
            raise
        except OSError as error:
            raise self._unreachable(error) from error
        try:
            try:
                found = _read_marker(root)
            except OSError as error:
                raise self._unreachable(error) from error
            require_marker(self, found)
            self._keep_private(root)
            yield root
        finally:
            os.close(root)

    def _keep_private(self, root: int) -> None:
        """Take the rights of other users from a folder that was made by hand or long ago."""
        mode = os.fstat(root).st_mode
        if not mode & _OTHER_USERS:
            return
        with suppress(OSError):
            os.fchmod(root, mode & 0o7777 & ~_OTHER_USERS)
        # The folder may belong to another user; some file systems keep no modes.
        if os.fstat(root).st_mode & _OTHER_USERS and not self._warned:
            self._warned = True
            log.warning("Other users of this machine can read the folder %s.", self._folder)

    def _unreachable(self, error: OSError) -> StoreUnreachable:
        return StoreUnreachable(f"{self._folder}: {error.strerror}.")

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Turn an OSError about one file into SourceMissing or StorageUnavailable."""
        try:
            yield
        except FileNotFoundError as error:
            raise SourceMissing() from error
        except OSError as error:
            raise StorageUnavailable(f"{self._folder}: {error.strerror}.") from error

    def _remove_leftovers(self, root: int, key: str) -> None:
        """Remove the files KEY#N that earlier versions left when they were killed during a put."""
        parent, _, name = key.rpartition("/")
        for found in (self._folder / parent).glob(name + "#*"):
            os.unlink(f"{parent}/{found.name}", dir_fd=root)


@contextmanager
def _opened_folder(folder: Path) -> Iterator[int]:
    root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield root
    finally:
        os.close(root)


def _read_marker(root: int) -> str | None:
    try:
        # A pipe in its place must not block.
        marker = os.open(MARKER, os.O_RDONLY | os.O_NONBLOCK, dir_fd=root)
    except FileNotFoundError:
        return None
    try:
        return marker_id(os.read(marker, _MARKER_BYTES))
    finally:
        os.close(marker)


def _write(root: int, name: str, content: bytes) -> None:
    """Write a small file whole or not at all."""
    temporary = f"{name}.{secrets.token_hex(4)}"
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=root)
    try:
        os.write(file, content)
        os.fsync(file)
        os.replace(temporary, name, src_dir_fd=root, dst_dir_fd=root)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=root)
        raise
    finally:
        os.close(file)


def _make_folders(root: int, key: str) -> None:
    """Make the folders above the key, each on the disk before what is in it."""
    for folder in list(PurePosixPath(key).parents)[-2::-1]:
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700, dir_fd=root)
            _flush(root, str(folder.parent))


def _link_or_copy(path: Path, temporary: str, root: int) -> None:
    try:
        os.link(path, temporary, dst_dir_fd=root)
    except OSError:
        # Another file system, or one without links. A copy gives the right error for the rest.
        _copy(path, temporary, root)
    _flush(root, temporary)


def _copy(path: Path, temporary: str, root: int) -> None:
    target = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=root)
    with os.fdopen(target, "wb") as written, path.open("rb") as source:
        shutil.copyfileobj(source, written, 1024 * 1024)


def _flush(root: int, name: str) -> None:
    """Flush to the disk, so that no committed row names bytes that a power failure lost."""
    descriptor = os.open(name, os.O_RDONLY, dir_fd=root)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _stat(root: int, key: str) -> os.stat_result:
    try:
        return os.stat(key, dir_fd=root)
    except NotADirectoryError as error:
        raise FileNotFoundError(key) from error


def _sha256(root: int, key: str) -> str:
    with os.fdopen(os.open(key, os.O_RDONLY, dir_fd=root), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
