"""A document's end as its owner wants it: cancel, delete, removal. Used by API, maintenance."""

from __future__ import annotations

import logging

from rag_service.database import document_rows
from rag_service.database.document_rows import DeletedDocument
from rag_service.database.engine import begin
from rag_service.documents.storage import DocumentStore, working_key
from rag_service.errors import Cancelled, NotFound, StorageUnavailable
from rag_service.jobs import runs

log = logging.getLogger(__name__)


def cancel(document_id: str) -> bool:
    """Cancel the active run; False where nothing was active. Raises NotFound."""
    with begin() as connection:
        if document_rows.find(connection, document_id) is None:
            raise NotFound(f"There is no document {document_id}.")
        return runs.cancel(connection, document_id, Cancelled())


def delete(document_id: str) -> None:
    """Cancel and hide the document; its rows and bytes go soon after. Raises NotFound."""
    with begin() as connection:
        if not document_rows.mark_deleted(connection, document_id):
            raise NotFound(f"There is no document {document_id}.")
    # Afterwards: no new run can come now, and a run is locked before its document.
    with begin() as connection:
        runs.cancel(connection, document_id, Cancelled())


def remove_deleted(store: DocumentStore, limit: int = 100) -> int:
    """Remove rows and bytes of deleted documents; how many are gone for good."""
    removed = 0
    for hidden in document_rows.removable_documents(limit):
        try:
            _remove(store, hidden)
        except StorageUnavailable as error:
            log.warning("The bytes of deleted document %s stay for now: %s", hidden.id, error)
            continue
        removed += 1
    return removed


def _remove(store: DocumentStore, deleted: DeletedDocument) -> None:
    """Bytes first: the hidden row brings us back to them where the store is away."""
    with document_rows.content_lock(deleted.sha256) as connection:
        with connection.begin():
            needed = document_rows.is_needed_by_others(
                connection, deleted.id, deleted.sha256, deleted.source_key
            )
        if not needed:
            store.delete(deleted.source_key)
        # After a crash a decrypted copy may stand there that no row names.
        store.delete(working_key(deleted.id))
        with connection.begin():
            document_rows.remove(connection, deleted.id)
