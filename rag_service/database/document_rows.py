"""Rows of documents: inserted, found by content or id, marked as deleted, removed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Connection, func, insert, select, text, update
from sqlalchemy import delete as delete_rows
from sqlalchemy.sql import ColumnElement

from rag_service.database.engine import LOCK_SECONDS, begin
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


# The longest copy of a file to or from the store while its content is locked.
_COPY_SECONDS = 3600


@contextmanager
def content_lock(sha256: str) -> Iterator[Connection]:
    """Hold the advisory lock of a content, over store + insert or over check + remove.

    Yield a connection in the transaction that owns the lock: a lock of the session would stay
    behind in a pooler's connection. Read in `connection.begin_nested()` before bytes are copied:
    at its end the transaction has no snapshot, and it holds up nothing but this content.
    """
    key = func.hashtextextended("content:" + sha256, 0)
    with begin() as connection:
        _set_local(connection, lock_timeout=0, idle_in_transaction_session_timeout=_COPY_SECONDS)
        connection.execute(select(func.pg_advisory_xact_lock(key)))
        _set_local(connection, lock_timeout=int(LOCK_SECONDS))
        yield connection


def _set_local(connection: Connection, **seconds: int) -> None:
    # Not by set_config(): the result of a SELECT keeps its snapshot until the next statement.
    for name, value in seconds.items():
        connection.execute(text(f"SET LOCAL {name} = '{value}s'"))


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


def is_needed(
    connection: Connection, sha256: str, source_key: str, *, besides: str | None = None
) -> bool:
    """Return whether a document of this content, `besides` the one, uses the bytes of the key."""
    query = select(Document.id).where(
        Document.sha256 == sha256,
        Document.source_key == source_key,
        Document.id.is_distinct_from(besides),
    )
    return connection.scalar(query.limit(1)) is not None
