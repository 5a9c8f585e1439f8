"""The document store: document bytes by key, in a local folder or in S3.

Open no database transaction around these calls. Without the right marker every method raises
StoreUnreachable (byte_store.py); which marker is right is decided once (store_binding.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from rag_service.config.options import Settings
from rag_service.documents.byte_store import ByteStore
from rag_service.documents.folder_store import FolderStore
from rag_service.documents.store_binding import bind
from rag_service.errors import ConfigurationError, SourceMissing, StoreUnreachable

_SHARED = "sha256/"
_KEY = re.compile(r"sha256/[0-9a-f]{2}/[0-9a-f]{64}|working/[0-9a-zA-Z-]+\.pdf")


def source_key(sha256: str) -> str:
    """Return the key of bytes that all documents with this hexadecimal sha256 share."""
    return f"{_SHARED}{sha256[:2]}/{sha256}"


def working_key(document_id: object) -> str:
    """Return the key of a document's own decrypted copy."""
    return f"working/{document_id}.pdf"


def local_folder(settings: Settings) -> Path | None:
    """Return the folder of the document store, or None for S3.

    Raises ConfigurationError for a storage.url that is neither s3:// nor file://.
    """
    url = settings.storage.url
    if url is None:
        return settings.data_dir / "documents"
    parts = urlsplit(url)
    if parts.scheme == "file" and not parts.netloc and parts.path:
        return Path(unquote(parts.path))
    if parts.scheme == "s3" and parts.netloc:
        return None
    raise ConfigurationError(
        "storage.url: must be s3://bucket/prefix or file:///folder"
        " (environment: RAG_SERVICE_STORAGE_URL)"
    )


class DocumentStore:
    """Puts, opens and deletes document bytes by key.

    Every method raises StorageUnavailable if the store fails, StoreUnreachable if it is not there
    at all, DatabaseError as long as its marker cannot be compared with the database, and
    ValueError for a key that neither source_key() nor working_key() made.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigurationError for a storage.url that is neither s3:// nor file://."""
        self._bytes = _open(settings)
        self._is_bound = False

    def put_file(self, key: str, path: Path) -> None:
        """Store the file's bytes under the key, completely or not at all, replacing an old object.

        A file on the store's file system is linked, not copied: do not write to it afterwards.
        Raises OSError if `path` cannot be read.
        """
        path.stat()
        with self._bound(key) as store:
            store.put(key, path)

    @contextmanager
    def open_local(self, key: str) -> Iterator[Path]:
        """Yield a path with the key's bytes, read-only, valid inside the `with` block.

        For a folder it is the stored file, for S3 a temporary one. Bytes whose key names their
        sha256 are compared with it. Raises SourceMissing if they are changed or missing.
        """
        sha256 = key.rpartition("/")[2] if key.startswith(_SHARED) else None
        with self._bound(key) as store:
            opened = store.open_local(key, sha256)
            path = opened.__enter__()
        try:
            yield path
        finally:
            opened.__exit__(None, None, None)

    def size(self, key: str) -> int | None:
        """Return the number of bytes under the key, or None if there is no such key."""
        try:
            with self._bound(key) as store:
                return store.size(key)
        except SourceMissing:
            return None

    def exists(self, key: str) -> bool:
        """Return whether the key exists."""
        return self.size(key) is not None

    def delete(self, key: str) -> None:
        """Delete the key; a missing key is no error."""
        with self._bound(key) as store:
            store.delete(key)

    def check(self) -> None:
        """Write a few bytes to check the store, in at most about five seconds."""
        with self._bound() as store:
            store.check()

    def check_place(self) -> None:
        """Check without the database, and without writing, that there can be a store."""
        self._bytes.check_place()

    def require_reachable(self) -> None:
        """Raise StoreUnreachable if the store is not there."""
        with self._bound() as store:
            store.require()

    def incoming(self) -> Path:
        """Return the folder that files are received in before they are put."""
        with self._bound() as store:
            return store.incoming()

    @contextmanager
    def _bound(self, key: str | None = None) -> Iterator[ByteStore]:
        """Yield the place of the bytes after its marker was compared with the database once."""
        if key is not None and not _KEY.fullmatch(key):
            raise ValueError(f"not a storage key: {key!r}")
        if not self._is_bound:
            bind(self._bytes)
            self._is_bound = True
        try:
            yield self._bytes
        except StoreUnreachable:
            # The database may have been restored or replaced, too: read its ID again.
            self._is_bound = False
            raise


def require_address(settings: Settings) -> None:
    """Raise ConfigurationError for a storage.url that is neither s3:// nor file://."""
    local_folder(settings)


def _open(settings: Settings) -> ByteStore:
    folder = local_folder(settings)
    if folder is not None:
        return FolderStore(folder)
    # obstore takes time to load, and only S3 needs it.
    from rag_service.documents.bucket_store import BucketStore

    return BucketStore(str(settings.storage.url), settings.data_dir)
