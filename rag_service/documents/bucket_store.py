"""Document bytes in an S3 bucket.

obstore's threads do not survive a fork: use a store only in the process that opened it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from rag_service.documents.byte_store import (
    HEALTH_KEY,
    MARKER,
    changed_bytes,
    marker_id,
    marker_text,
    require_marker,
)
from rag_service.documents.folder_store import INCOMING
from rag_service.errors import (
    ConfigurationError,
    SourceMissing,
    StorageUnavailable,
    StoreUnreachable,
)

if TYPE_CHECKING:
    from obstore.store import RetryConfig

_PART_BYTES = 8 * 1024 * 1024
# Four parts of 8 MiB bound an upload's memory to 32 MiB.
_PARTS_AT_ONCE = 4
_READ_BYTES = 1024 * 1024
_FULL_RETRY: RetryConfig = {"max_retries": 5, "retry_timeout": timedelta(seconds=60)}
_NO_RETRY: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(seconds=5)}
# A bucket is not unmounted, so its marker need not be read for each key.
_MARKER_SECONDS = 10.0


class BucketStore:
    """A ByteStore in a bucket, below a prefix. `data_dir`: where files are received."""

    def __init__(self, url: str, data_dir: Path) -> None:
        """Raises ConfigurationError for a URL or AWS_* variables that obstore refuses."""
        self.store_id: str | None = None
        self._url = url.rstrip("/")
        self._data_dir = data_dir
        self._owner = os.getpid()
        self._store = _open_s3(url, _FULL_RETRY, read_timeout=30)
        self._probe = _open_s3(url, _NO_RETRY, read_timeout=5)
        self._marker_seen = float("-inf")

    @property
    def place(self) -> str:
        return self._url

    @property
    def marker_place(self) -> str:
        return f"{self._url}/{MARKER}"

    def read_marker(self) -> str | None:
        self._reject_after_fork()
        try:
            return marker_id(bytes(obstore.get(self._probe, MARKER).bytes()))
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as error:
            raise StoreUnreachable(f"{self._url}: {_first_line(error)}") from error

    def create(self, store_id: str) -> None:
        self._reject_after_fork()
        try:
            obstore.put(self._probe, MARKER, marker_text(store_id).encode(), use_multipart=False)
        except (BaseError, OSError) as error:
            raise StoreUnreachable(f"{self._url}: {_first_line(error)}") from error

    def contains(self, key: str) -> bool:
        self._reject_after_fork()
        try:
            obstore.head(self._probe, key)
        except FileNotFoundError:
            return False
        except (BaseError, OSError) as error:
            raise StoreUnreachable(f"{self._url}: {_first_line(error)}") from error
        return True

    def put(self, key: str, path: Path) -> None:
        """Upload the file. Uses less than 50 MiB of memory for any size."""
        with path.open("rb") as source, self._guarded():
            size = os.fstat(source.fileno()).st_size
            obstore.put(
                self._store, key, source,
                chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE,
            )  # fmt: skip
            stored = obstore.head(self._store, key)["size"]
            if stored != size:
                raise StorageUnavailable(f"The store kept {stored} of {size} bytes of {key}.")

    @contextmanager
    def open_local(self, key: str, sha256: str | None) -> Iterator[Path]:
        """Yield the path of a temporary copy, valid inside the `with` block."""
        with tempfile.NamedTemporaryFile(prefix="rag_service-") as target:
            with self._guarded():
                self._download(key, Path(target.name), sha256)
            yield Path(target.name)

    def size(self, key: str) -> int:
        with self._guarded():
            return obstore.head(self._store, key)["size"]

    def delete(self, key: str) -> None:
        try:
            with self._guarded():
                obstore.delete(self._store, key)
        except SourceMissing:
            return

    def require(self) -> None:
        self._require_marker(longest=_MARKER_SECONDS)

    def check(self) -> None:
        self._require_marker(longest=0.0)
        try:
            obstore.put(self._probe, HEALTH_KEY, b"ok", use_multipart=False)
        except (BaseError, OSError) as error:
            raise StorageUnavailable(f"{self._url}: {_first_line(error)}") from error

    def check_place(self) -> None:
        self._reject_after_fork()
        try:
            next(iter(obstore.list(self._probe, chunk_size=1)), None)
        except (BaseError, OSError) as error:
            raise StorageUnavailable(f"{self._url}: {_first_line(error)}") from error

    def incoming(self) -> Path:
        folder = self._data_dir / INCOMING
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StorageUnavailable(f"{folder}: {error.strerror}.") from error
        return folder

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Turn what obstore raises into SourceMissing or StorageUnavailable."""
        self._require_marker(longest=_MARKER_SECONDS)
        try:
            yield
        except FileNotFoundError as error:
            # The whole bucket or prefix may be gone.
            self._require_marker(longest=0.0)
            raise SourceMissing() from error
        except (BaseError, OSError) as error:
            self._marker_seen = float("-inf")
            raise StorageUnavailable(f"{self._url}: {_first_line(error)}") from error

    def _require_marker(self, *, longest: float) -> None:
        """Read the marker unless it was there within `longest` seconds. Raises StoreUnreachable."""
        self._reject_after_fork()
        now = time.monotonic()
        if now - self._marker_seen < longest:
            return
        require_marker(self, self.read_marker())
        self._marker_seen = now

    def _reject_after_fork(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError("This document store was opened before a fork and would hang.")

    def _download(self, key: str, target: Path, sha256: str | None) -> None:
        answer = obstore.get(self._store, key)
        digest = hashlib.sha256()
        written = 0
        with target.open("wb") as file:
            for chunk in answer.stream(min_chunk_size=_READ_BYTES):
                digest.update(chunk)
                written += file.write(chunk)
        if written != answer.meta["size"]:
            raise StorageUnavailable(f"The store sent {written} bytes of {key}, which is not all.")
        if sha256 is not None and digest.hexdigest() != sha256:
            raise changed_bytes(key, written)


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
