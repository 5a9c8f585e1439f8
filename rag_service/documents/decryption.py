"""Decryption of PDFs with a password, which is used once and never stored.

The decrypted copy belongs to one document: it is stored under the document's id and removed with
the document.
"""

from __future__ import annotations

import asyncio
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
)
from rag_service.pdf.media_type import PDF
from rag_service.pdf.session import PdfSession


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
        replace_by_copy(connection, store, document, decrypted)


def replace_by_copy(
    connection: Connection, store: DocumentStore, document: StoredDocument, decrypted: Path
) -> None:
    """Replace the document's bytes by the copy; delete the encrypted ones if no other uses them.

    The caller holds the content's lock and has no transaction open.
    """
    key = working_key(document.id)
    store.put_file(key, decrypted)
    with connection.begin():
        document_rows.set_source(connection, document.id, key)
        is_needed = document_rows.is_needed_by_others(
            connection, document.id, document.sha256, document.source_key
        )
    if not is_needed and document.source_key != key:
        store.delete(document.source_key)
