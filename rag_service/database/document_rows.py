"""Rows of documents: inserted, found by content or id, marked as deleted, removed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Connection, func, insert, select, update
from sqlalchemy import delete as delete_rows
from sqlalchemy.sql import ColumnElement

from rag_service.database.engine import begin, get_engine
from rag_service.database.models import Document, RemoteJob, Run, new_id
from rag_service.database.storable_text import clean
from rag_service.states import TERMINAL, JobState, RunState


@dataclass(frozen=True, slots=True)
class NewDocument:
    """A received file that has no row yet."""

    collection: str
    sha256: str
    filename: str
    media_type: str
    bytes: int


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """An undeleted document with the state and options of its newest run."""

    id: str
    sha256: str
    filename: str
    source_key: str
    run_id: str
    state: RunState
    fingerprint: str

    @property
    def active(self) -> bool:
        return self.state not in TERMINAL


@contextmanager
def content_lock(sha256: str) -> Iterator[Connection]:
    """Hold the advisory lock of a content, over store + insert or over check + remove.

    The lock belongs to the session, so that no transaction is open while bytes are copied. Open
    transactions on the yielded connection with `connection.begin()`.
    """
    key = select(func.pg_advisory_lock(func.hashtextextended("content:" + sha256, 0)))
    unlock = select(func.pg_advisory_unlock(func.hashtextextended("content:" + sha256, 0)))
    with get_engine().connect() as connection:
        with connection.begin():
            connection.execute(func.set_config("lock_timeout", "0", True).select())
            connection.execute(key)
        try:
            yield connection
        finally:
            with connection.begin():
                connection.execute(unlock)


def insert_document(
    connection: Connection, new: NewDocument, source_key: str, document_id: str | None = None
) -> str:
    """Insert the row; a unique index rejects the same content twice in a collection."""
    document_id = document_id or new_id()
    connection.execute(
        insert(Document).values(
            id=document_id,
            collection=new.collection,
            sha256=new.sha256,
            filename=clean(new.filename),
            media_type=new.media_type,
            bytes=new.bytes,
            source_key=source_key,
        )
    )
    return document_id


def find_by_content(connection: Connection, collection: str, sha256: str) -> StoredDocument | None:
    """Return the undeleted document with this content in this collection, or None."""
    return _find_one(connection, Document.collection == collection, Document.sha256 == sha256)


def find(connection: Connection, document_id: str) -> StoredDocument | None:
    """Return the undeleted document with this id, or None."""
    return _find_one(connection, Document.id == document_id)


def _find_one(connection: Connection, *conditions: ColumnElement[bool]) -> StoredDocument | None:
    query = (
        select(
            Document.id,
            Document.sha256,
            Document.filename,
            Document.source_key,
            Run.id,
            Run.state,
            Run.fingerprint,
        )
        .join(Run, Run.document_id == Document.id)
        .where(Document.deleted_at.is_(None), *conditions)
        .order_by(Run.number.desc())
        .limit(1)
    )
    row = connection.execute(query).one_or_none()
    if row is None:
        return None
    return StoredDocument(*row[:5], RunState(row[5]), row[6])


def set_source(connection: Connection, document_id: str, source_key: str) -> None:
    """Set the key of the document's bytes, to that of its decrypted copy."""
    connection.execute(
        update(Document).where(Document.id == document_id).values(source_key=source_key)
    )


def mark_deleted(connection: Connection, document_id: str) -> bool:
    """Mark as deleted, so that the same file may be ingested again at once.

    Return False if the document is unknown or was deleted before.
    """
    marked = connection.execute(
        update(Document)
        .where(Document.id == document_id, Document.deleted_at.is_(None))
        .values(deleted_at=func.now())
    )
    return marked.rowcount == 1


@dataclass(frozen=True, slots=True)
class DeletedDocument:
    """A deleted document whose rows and bytes are not removed yet."""

    id: str
    sha256: str
    source_key: str


def removable_documents(limit: int) -> Sequence[DeletedDocument]:
    """Return deleted documents without live remote jobs, oldest deletion first."""
    live = (
        select(RemoteJob.id)
        .join(Run, Run.id == RemoteJob.run_id)
        .where(Run.document_id == Document.id, RemoteJob.state != JobState.ENDED)
        .correlate(Document)
    )
    query = (
        select(Document.id, Document.sha256, Document.source_key)
        .where(Document.deleted_at.is_not(None), ~live.exists())
        .order_by(Document.deleted_at)
        .limit(limit)
    )
    with begin() as connection:
        return [DeletedDocument(*row) for row in connection.execute(query)]


def remove(connection: Connection, document_id: str) -> None:
    """Remove a document's rows: runs first, which is the order of all locks."""
    connection.execute(delete_rows(Run).where(Run.document_id == document_id))
    connection.execute(delete_rows(Document).where(Document.id == document_id))


def is_needed_by_others(
    connection: Connection, document_id: str, sha256: str, source_key: str
) -> bool:
    """Return whether another document of the same content uses the bytes under this key."""
    query = select(Document.id).where(
        Document.sha256 == sha256, Document.source_key == source_key, Document.id != document_id
    )
    return connection.scalar(query.limit(1)) is not None
