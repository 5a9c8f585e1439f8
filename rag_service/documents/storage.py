"""Document bytes in a local folder or in S3.

obstore's threads do not survive a fork: use a store only in the process that opened it. Open no
database transaction around these calls.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, S3Store

from rag_service.config.options import Settings
from rag_service.errors import ConfigurationError, SourceMissing, StorageUnavailable

if TYPE_CHECKING:
    from obstore.store import RetryConfig

_KEY = re.compile(r"sha256/[0-9a-f]{2}/[0-9a-f]{64}|working/[0-9a-zA-Z-]+\.pdf")
_HEALTH_KEY = "health"
_PART_BYTES = 8 * 1024 * 1024
# Four parts of 8 MiB bound an upload's memory to 32 MiB.
_PARTS_AT_ONCE = 4
_READ_BYTES = 1024 * 1024
_FULL_RETRY: RetryConfig = {"max_retries": 5, "retry_timeout": timedelta(seconds=60)}
_NO_RETRY: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(seconds=5)}


def source_key(sha256: str) -> str:
    """Return the key of bytes that all documents with this hexadecimal sha256 share."""
    return f"sha256/{sha256[:2]}/{sha256}"


def require_address(settings: Settings) -> None:
    """Raise ConfigurationError for a storage.url that is neither s3:// nor file://."""
    _folder(settings.storage.url, settings.data_dir)


def working_key(document_id: object) -> str:
    """Return the key of a document's own decrypted copy."""
    return f"working/{document_id}.pdf"


class DocumentStore:
    """Puts, opens and deletes document bytes by key.

    Every method raises StorageUnavailable if the store fails or cannot be reached, and ValueError
    for a key that neither source_key() nor working_key() made.
    """

    def __init__(self, settings: Settings, *, create: bool = True) -> None:
        """Raises ConfigurationError for a storage.url that is neither s3:// nor file://.

        `create`: make a missing folder. Readers do not, because an unmounted folder must not be
        replaced by an empty one, as if its documents were missing.
        """
        url = settings.storage.url
        self._folder = _folder(url, settings.data_dir)
        self._owner = os.getpid()
        if self._folder is None:
            self._store: LocalStore | S3Store = _open_s3(str(url), _FULL_RETRY, read_timeout=30)
            self._probe: LocalStore | S3Store = _open_s3(str(url), _NO_RETRY, read_timeout=5)
        else:
            self._store = self._probe = _open_folder(self._folder, create=create)

    def put_file(self, key: str, path: Path) -> None:
        """Store the file's bytes under the key, completely or not at all, replacing an old object.

        Uses less than 50 MiB of memory for any size. Raises OSError if `path` cannot be read.
        """
        with path.open("rb") as source, self._guarded(key):
            size = os.fstat(source.fileno()).st_size
            obstore.put(
                self._store, key, source,
                chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE,
            )  # fmt: skip
            stored = obstore.head(self._store, key)["size"]
            if stored != size:
                raise StorageUnavailable(f"The store kept {stored} of {size} bytes of {key}.")
            self._flush(key)

    @contextmanager
    def open_local(self, key: str) -> Iterator[Path]:
        """Yield a path with the key's bytes, read-only, valid inside the `with` block.

        For a folder it is the stored file, for S3 a temporary one, checked against the key's
        sha256. Raises SourceMissing if there is no such key.
        """
        if self._folder is not None:
            if not self.exists(key):
                raise SourceMissing()
            yield self._folder / key
            return
        with tempfile.NamedTemporaryFile(prefix="rag_service-") as target:
            with self._guarded(key):
                self._download(key, Path(target.name))
            yield Path(target.name)

    def exists(self, key: str) -> bool:
        """Return whether the key exists. Raises StorageUnavailable if the store cannot be read."""
        try:
            with self._guarded(key):
                obstore.head(self._store, key)
        except SourceMissing:
            return False
        return True

    def delete(self, key: str) -> None:
        """Delete the key; a missing key is no error."""
        try:
            with self._guarded(key):
                self._remove_leftovers(key)
                obstore.delete(self._store, key)
        except SourceMissing:
            return

    def check(self) -> None:
        """Write a few bytes to check the store, in at most about five seconds."""
        self._reject_after_fork()
        try:
            obstore.put(self._probe, _HEALTH_KEY, b"ok", use_multipart=False)
        except (BaseError, OSError) as error:
            raise StorageUnavailable(_first_line(error)) from error

    @contextmanager
    def _guarded(self, key: str) -> Iterator[None]:
        """Turn what obstore raises into SourceMissing or StorageUnavailable."""
        if not _KEY.fullmatch(key):
            raise ValueError(f"not a storage key: {key!r}")
        self._reject_after_fork()
        try:
            yield
        except FileNotFoundError as error:
            self._reject_missing_store()
            raise SourceMissing() from error
        except (BaseError, OSError) as error:
            raise StorageUnavailable(_first_line(error)) from error

    def _reject_missing_store(self) -> None:
        """Raise StorageUnavailable if the bucket or folder is missing, not only the key."""
        try:
            if self._folder is not None:
                self._folder.stat()
            else:
                next(iter(obstore.list(self._probe, chunk_size=1)), None)
        except (BaseError, OSError) as error:
            raise StorageUnavailable(_first_line(error)) from error

    def _reject_after_fork(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError("This DocumentStore was opened before a fork and would hang.")

    def _download(self, key: str, target: Path) -> None:
        answer = obstore.get(self._store, key)
        digest = hashlib.sha256()
        written = 0
        with target.open("wb") as file:
            for chunk in answer.stream(min_chunk_size=_READ_BYTES):
                digest.update(chunk)
                written += file.write(chunk)
        expected = key.rpartition("/")[2] if key.startswith("sha256/") else digest.hexdigest()
        if written != answer.meta["size"] or digest.hexdigest() != expected:
            raise StorageUnavailable(
                f"The store returned changed bytes for {key} ({written} bytes)."
            )

    def _remove_leftovers(self, key: str) -> None:
        """Remove the files KEY#N that obstore leaves when the process is killed during a put."""
        if self._folder is not None:
            path = self._folder / key
            for leftover in path.parent.glob(path.name + "#*"):
                leftover.unlink(missing_ok=True)

    def _flush(self, key: str) -> None:
        """Flush to the disk, so that no committed row names bytes that a power failure lost."""
        if self._folder is None:
            return
        path = self._folder / key
        for flushed in (path, path.parent):
            descriptor = os.open(flushed, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _folder(url: str | None, data_dir: Path) -> Path | None:
    """Return the local folder, or None for S3. Raises ConfigurationError."""
    if url is None:
        return data_dir / "documents"
    parts = urlsplit(url)
    if parts.scheme == "file" and not parts.netloc and parts.path:
        return Path(unquote(parts.path))
    if parts.scheme == "s3" and parts.netloc:
        return None
    raise ConfigurationError(
        "storage.url: must be s3://bucket/prefix or file:///folder"
        " (environment: RAG_SERVICE_STORAGE_URL)"
    )


def _open_folder(folder: Path, *, create: bool) -> LocalStore:
    try:
        if create:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return LocalStore(folder)
    except (BaseError, OSError) as error:
        raise StorageUnavailable(f"{folder}: {_first_line(error)}") from error


def _open_s3(url: str, retry: RetryConfig, *, read_timeout: float) -> S3Store:
    """Open the bucket; region, endpoint and credentials come from the usual AWS_* variables.

    `read_timeout`: seconds without any byte, not for the whole file.
    """
    try:
        return S3Store.from_url(
            url,
            retry_config=retry,
            client_options={
                # The scheme of the endpoint's URL decides; without an endpoint it is https.
                "allow_http": True,
                "connect_timeout": timedelta(seconds=5),
                "read_timeout": timedelta(seconds=read_timeout),
                "timeout": timedelta(hours=1),
            },
            # Not every S3 server supports bulk deletion, and keys are deleted one at a time.
            disable_bulk_delete=True,
        )
    except BaseError as error:
        raise ConfigurationError(f"storage.url: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """Return the first line of the message, because obstore appends long internal details."""
    return str(error).strip().partition("\n")[0]
