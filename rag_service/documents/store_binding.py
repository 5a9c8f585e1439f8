"""Ties a document store to its database, once, by the ID in the store's marker.

A place is taken for a new store only while the database has no documents. A store of an earlier
version, which has no marker, gets one if it holds files of the database's documents. In every
other case a missing or different marker means that the store is not there.
"""

from __future__ import annotations

import logging

from rag_service.database import store_rows
from rag_service.documents.byte_store import ByteStore, require_marker

log = logging.getLogger(__name__)


def bind(store: ByteStore) -> None:
    """Give the store the ID that its marker must have; write the marker of a new store.

    Raises StoreUnreachable, and DatabaseError if the database cannot be asked.
    """
    known = store_rows.identity()
    store.store_id = known.id
    found = store.read_marker()
    if found is None and not known.bound and _may_be_marked(store):
        log.info("Marking %s as the document store %s", store.place, known.id)
        store.create(known.id)
        found = store.read_marker()
    require_marker(store, found)
    if not known.bound:
        store_rows.note_bound()


def _may_be_marked(store: ByteStore) -> bool:
    """Return whether a place without a marker is new, or holds files of known documents."""
    keys = store_rows.some_source_keys()
    return not keys or any(store.contains(key) for key in keys)
