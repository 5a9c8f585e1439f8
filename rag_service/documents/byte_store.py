"""What a place for document bytes must do, whatever it is: a folder or a bucket.

A place is a document store only with its marker, a small file with the store's ID. Without it a
place is unmounted, or not this service's; then nothing is read from it or written to it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from rag_service.errors import SourceMissing, StoreUnreachable

MARKER = "rag_service-store"
HEALTH_KEY = "health"
_MARKER_TEXT = """{id}
This file ties the document store around it to its database. Keep it: without it rag_service takes
the store for one that is not mounted.
"""


class ByteStore(Protocol):
    """Bytes by key. `store_id` is the ID that the marker must have; None until it is known.

    Methods that name a key raise StoreUnreachable without the right marker, StorageUnavailable if
    the place fails otherwise.
    """

    store_id: str | None

    @property
    def place(self) -> str:
        """The place, for people."""

    @property
    def marker_place(self) -> str:
        """The place of the marker, for people."""

    def read_marker(self) -> str | None:
        """Return the ID in the marker, or None if there is no marker, whatever the reason."""

    def create(self, store_id: str) -> None:
        """Make a missing place, and write its marker."""

    def contains(self, key: str) -> bool:
        """Return whether the key exists, with or without a marker."""

    def put(self, key: str, path: Path) -> None:
        """Store the file's bytes under the key, completely or not at all."""

    def open_local(self, key: str, sha256: str | None) -> AbstractContextManager[Path]:
        """Yield a path with the key's bytes, which must have the sha256 if one is given."""

    def size(self, key: str) -> int:
        """Return the number of bytes. Raises SourceMissing."""

    def delete(self, key: str) -> None:
        """Delete the key; a missing key is no error."""

    def require(self) -> None:
        """Raise StoreUnreachable without the right marker."""

    def check(self) -> None:
        """Check that it can be written to, in at most about five seconds."""

    def check_place(self) -> None:
        """Check, without writing, that the place is there or can be made."""

    def incoming(self) -> Path:
        """Return the folder for files that are to be put, which exists."""


def marker_text(store_id: str) -> str:
    """Return the content of the marker."""
    return _MARKER_TEXT.format(id=store_id)


def marker_id(text: bytes) -> str:
    """Return the ID in the content of a marker."""
    return text.partition(b"\n")[0].decode("utf-8", "replace").strip()


def require_marker(store: ByteStore, found: str | None) -> None:
    """Raise StoreUnreachable, which says what to do, unless the ID found is the store's."""
    if found == store.store_id:
        return
    cause = (
        f"{store.place} is not mounted or not the document store: the file {store.marker_place} is "
        "missing. Mount the store"
        if found is None
        else f"{store.place} is the document store of another database: {store.marker_place} says "
        f"{found[:80]!r}. Set storage.url to this database's store"
    )
    raise StoreUnreachable(
        f"{cause}. Only if its files are lost, or to give this place to this database, "
        f"write {store.store_id} into {store.marker_place}."
    )


def changed_bytes(key: str, size: int) -> SourceMissing:
    """Return the error for stored bytes whose sha256 is no longer that of their key."""
    return SourceMissing(
        f"The stored file {key} was changed or cut off ({size} bytes); send the file again."
    )
