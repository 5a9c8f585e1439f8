"""Opens encrypted PDFs with a password that is used once and kept nowhere. Used by API, intake.

The decrypted working copy belongs to one document, lives under the document's id and goes with it.
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
    settings: Settings, path: Path, media_type: str, password: str | None
) -> AsyncIterator[Path | None]:
    """A readable copy of the PDF for the length of the block; None where none is needed.

    A file that no password helps is no error here: it gets its row and fails by name.
    Raises WrongPassword.
    """
    if not password or media_type != PDF:
        yield None
        return
    with scratch_file(settings) as target:
        yield target if await _decrypt(settings, path, password, target) else None


async def _decrypt(settings: Settings, path: Path, password: str, target: Path) -> bool:
    """Whether the target holds a copy. A child of its own sees the password and ends with it."""
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
    """Replace a stored document's bytes by a readable copy, where the password is needed.

    Raises NotFound, AlreadyActive, WrongPassword, SourceMissing, StorageUnavailable.
    """
    document = await asyncio.to_thread(_ended, document_id)
    with ExitStack() as held:
        source = store.open_local(document.source_key)
        path = await asyncio.to_thread(held.enter_context, source)
        async with unlocked(settings, path, PDF, password) as decrypted:
            if decrypted is not None:
                await asyncio.to_thread(_adopt, store, document_id, decrypted)


def _ended(document_id: str) -> StoredDocument:
    with begin() as connection:
        document = document_rows.find(connection, document_id)
    if document is None:
        raise NotFound(f"There is no document {document_id}.")
    if document.active:
        raise AlreadyActive()
    return document


def _adopt(store: DocumentStore, document_id: str, decrypted: Path) -> None:
    document = _ended(document_id)
    with document_rows.content_lock(document.sha256) as connection:
        adopt_copy(connection, store, document, decrypted)


def adopt_copy(
    connection: Connection, store: DocumentStore, document: StoredDocument, decrypted: Path
) -> None:
    """Make the copy the document's bytes; the encrypted ones go with their last document.

    The caller holds the content's lock and has no transaction open.
    """
    key = working_key(document.id)
    store.put_file(key, decrypted)
    with connection.begin():
        document_rows.set_source(connection, document.id, key)
        needed = document_rows.is_needed_by_others(
            connection, document.id, document.sha256, document.source_key
        )
    if not needed and document.source_key != key:
        store.delete(document.source_key)
