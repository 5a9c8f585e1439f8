"""Cancelling, deleting and removing documents."""

from __future__ import annotations

import logging

from rag_service.database import document_rows
from rag_service.database.document_rows import DeletedDocument
from rag_service.database.engine import begin
from rag_service.documents.storage import DocumentStore, working_key
from rag_service.errors import Cancelled, NotFound, StorageUnavailable, StoreUnreachable
from rag_service.jobs import runs

log = logging.getLogger(__name__)


def cancel(document_id: str) -> bool:
    """Cancel the active run. Return False if no run is active. Raises NotFound."""
    with begin() as connection:
        if document_rows.find(connection, document_id) is None:
            raise NotFound(f"No document {document_id}.")
        return runs.cancel(connection, document_id, Cancelled())


def delete(document_id: str) -> None:
    """Cancel and mark the document as deleted; maintenance removes rows and bytes later.

    Raises NotFound.
    """
    with begin() as connection:
        if not document_rows.mark_deleted(connection, document_id):
            raise NotFound(f"No document {document_id}.")
    # A second transaction: no new run can be added now, and a run is locked before its document.
    with begin() as connection:
        runs.cancel(connection, document_id, Cancelled())


def remove_deleted(store: DocumentStore, limit: int = 100) -> int:
    """Remove rows and bytes of up to `limit` deleted documents. Return the number removed."""
    removed = 0
    for deleted in document_rows.removable_documents(limit):
        try:
            _remove(store, deleted)
        except StoreUnreachable as error:
            log.warning("No deleted document can be removed now: %s", error)
            break
        except StorageUnavailable as error:
            log.warning("Cannot remove deleted document %s now: %s", deleted.id, error)
            continue
        removed += 1
    return removed


def _remove(store: DocumentStore, deleted: DeletedDocument) -> None:
    """Remove bytes first: if the store is unreachable, the row makes a later round try again."""
    with document_rows.content_lock(deleted.sha256) as connection:
        with connection.begin_nested():
            is_needed = document_rows.is_needed(
                connection, deleted.sha256, deleted.source_key, besides=deleted.id
            )
        if not is_needed:
            store.delete(deleted.source_key)
        # After a crash there may be a decrypted copy that no row names.
        store.delete(working_key(deleted.id))
        document_rows.remove(connection, deleted.id)
