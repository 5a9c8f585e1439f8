"""Decryption of PDFs with a password, which is used once and never stored.

The decrypted copy belongs to one document: it is stored under the document's id and removed with
the document.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from rag_service.config.options import Settings
from rag_service.database import document_rows
from rag_service.database.document_rows import StoredDocument
from rag_service.database.engine import Connection, begin
from rag_service.documents.incoming_file import scratch_file
from rag_service.documents.storage import DocumentStore, working_key
from rag_service.errors import (
    AlreadyActive,
    CorruptPdf,
    DocumentError,
    EncryptedPdf,
    NotFound,
    StorageUnavailable,
)
from rag_service.pdf.media_type import PDF
from rag_service.pdf.session import PdfSession

log = logging.getLogger(__name__)


@asynccontextmanager
async def unlocked(
    settings: Settings, path: Path, media_type: str, password: str | None, folder: Path
) -> AsyncIterator[Path | None]:
    """Yield the path of a decrypted copy in the folder, or None if none is needed.

    The copy is removed afterwards.

    A file that cannot be decrypted by any password is no error here: prepare reports it.
    Raises WrongPassword.
    """
    if not password or media_type != PDF:
        yield None
        return
    with scratch_file(folder) as target:
        yield target if await _decrypt(settings, path, password, target) else None


async def _decrypt(settings: Settings, path: Path, password: str, target: Path) -> bool:
    """Write a decrypted copy to `target`. Return False if none is needed or possible.

    Only a child process, which ends afterwards, gets the password.
    """
    async with PdfSession(settings.pdf, settings.limits.max_pages) as pdf:
        if not await _is_encrypted(pdf, path):
            return False
        try:
            await pdf.decrypt(path, password, target)
        except (EncryptedPdf, CorruptPdf):
            return False
    return True


async def _is_encrypted(pdf: PdfSession, path: Path) -> bool:
    try:
        await pdf.open(path, PDF)
    except EncryptedPdf:
        return True
    except DocumentError:
        return False
    return False


async def unlock_stored(
    settings: Settings, store: DocumentStore, document_id: str, password: str
) -> None:
    """Replace a stored document's bytes by a decrypted copy if it needs the password.

    Raises NotFound, AlreadyActive, WrongPassword, SourceMissing, StorageUnavailable.
    """
    document = await asyncio.to_thread(_find_inactive, document_id)
    with ExitStack() as held:
        source = store.open_local(document.source_key)
        path = await asyncio.to_thread(held.enter_context, source)
        folder = await asyncio.to_thread(store.incoming)
        async with unlocked(settings, path, PDF, password, folder) as decrypted:
            if decrypted is not None:
                await asyncio.to_thread(_replace_under_lock, store, document_id, decrypted)


def _find_inactive(document_id: str) -> StoredDocument:
    with begin() as connection:
        document = document_rows.find(connection, document_id)
    if document is None:
        raise NotFound(f"No document {document_id}.")
    if document.active:
        raise AlreadyActive()
    return document


def _replace_under_lock(store: DocumentStore, document_id: str, decrypted: Path) -> None:
    document = _find_inactive(document_id)
    with document_rows.content_lock(document.sha256) as connection:
        store_copy(connection, store, document, decrypted)
    remove_if_unused(store, document)


def store_copy(
    connection: Connection, store: DocumentStore, document: StoredDocument, decrypted: Path
) -> None:
    """Store the copy as the document's bytes; the caller holds the content's lock.

    The encrypted bytes stay until the transaction is committed: see `remove_if_unused`.
    """
    key = working_key(document.id)
    store.put_file(key, decrypted)
    document_rows.set_source(connection, document.id, key)


def remove_if_unused(store: DocumentStore, document: StoredDocument) -> None:
    """Delete the bytes that the document had before if no document uses them now."""
    if document.source_key == working_key(document.id):
        return
    try:
        with document_rows.content_lock(document.sha256) as connection:
            with connection.begin_nested():
                is_needed = document_rows.is_needed(
                    connection, document.sha256, document.source_key
                )
            if not is_needed:
                store.delete(document.source_key)
    except StorageUnavailable as error:
        # The document has its decrypted copy: it can be read.
        log.warning("The encrypted bytes %s stay stored: %s", document.source_key, error)
