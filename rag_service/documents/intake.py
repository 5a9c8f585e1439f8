"""Accepts documents: checks, stores bytes, inserts document and run, rings. Used by the API."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from rag_service.config.options import Settings
from rag_service.database import document_rows
from rag_service.database.document_rows import NewDocument, StoredDocument
from rag_service.database.engine import Connection, begin
from rag_service.database.models import new_id
from rag_service.database.storable_text import clean
from rag_service.documents.decryption import adopt_copy
from rag_service.documents.incoming_file import IncomingFile
from rag_service.documents.storage import DocumentStore, source_key, working_key
from rag_service.errors import (
    AlreadyActive,
    BacklogFull,
    InvalidOptions,
    NotFound,
    OptionsDiffer,
)
from rag_service.jobs import runs, wake_ups
from rag_service.jobs.runs import RunOptions
from rag_service.parsers.registry import require_parser
from rag_service.states import OcrMode, Priority, RunState, Stage

DEFAULT_COLLECTION = "default"
_COLLECTION = re.compile(r"[\w][\w .:/@+-]{0,127}")
_LONGEST_NAME = 255


@dataclass(frozen=True, slots=True)
class IntakeOptions:
    """What a sender may choose, checked."""

    collection: str
    run: RunOptions
    priority: Priority


@dataclass(frozen=True, slots=True)
class Accepted:
    """What became of an upload; `queued` where it made a run."""

    id: str
    status: RunState
    duplicate: bool
    queued: bool


def check_options(
    settings: Settings,
    *,
    collection: str | None = None,
    parser: str | None = None,
    ocr: str | None = None,
    priority: str | None = None,
) -> IntakeOptions:
    """Options from their names, defaults filled in. Raises InvalidOptions."""
    collection = collection or DEFAULT_COLLECTION
    if not _COLLECTION.fullmatch(collection):
        raise InvalidOptions(
            "collection: begin with a letter or digit; up to 128 letters, digits, spaces "
            "and _ . : / @ + -"
        )
    return IntakeOptions(
        collection, run_options(settings, parser=parser, ocr=ocr), _priority(priority)
    )


def run_options(
    settings: Settings, *, parser: str | None = None, ocr: str | None = None
) -> RunOptions:
    """How a document would be read today. Raises InvalidOptions."""
    try:
        mode = OcrMode(ocr or OcrMode.AUTO)
    except ValueError as error:
        raise InvalidOptions(f"ocr: {ocr!r} is none of auto, force, off.") from error
    return RunOptions(
        parser=require_parser(parser or settings.parser.default),
        model=settings.ocr.model,
        ocr=mode,
        dpi=settings.ocr.dpi,
        layout=settings.ocr.layout,
    )


def _priority(name: str | None) -> Priority:
    try:
        return Priority[(name or "bulk").upper()]
    except KeyError as error:
        raise InvalidOptions(f"priority: {name!r} is neither interactive nor bulk.") from error


def display_name(name: str | None) -> str:
    """A sender's file name without its folders, for people to read; never used as a path."""
    base = " ".join(clean(PurePosixPath(PureWindowsPath(name or "").name).name).split())
    return base[:_LONGEST_NAME] or "unnamed"


def require_backlog_space(settings: Settings) -> None:
    """Raise BacklogFull where too many documents wait already."""
    with begin() as connection:
        waiting = runs.backlog(connection)
    if waiting >= settings.limits.max_backlog:
        raise BacklogFull(
            f"{waiting} documents wait already (limits.max_backlog); try again later."
        )


def accept(
    settings: Settings,
    store: DocumentStore,
    spool: IncomingFile,
    filename: str | None,
    options: IntakeOptions,
    *,
    decrypted: Path | None = None,
) -> Accepted:
    """Store the upload and queue it, or name the document that it already is.

    `decrypted` is a readable copy of an encrypted PDF; it is kept for this document alone.
    Raises EmptyFile, UnsupportedType, OptionsDiffer, BacklogFull, StorageUnavailable.
    """
    media_type = spool.finish()
    require_backlog_space(settings)
    new = NewDocument(
        collection=options.collection,
        sha256=spool.sha256,
        filename=display_name(filename),
        media_type=media_type,
        bytes=spool.bytes,
    )
    with document_rows.content_lock(new.sha256) as connection:
        accepted, run_id = _settle(connection, store, new, spool.path, options, decrypted)
    if run_id is not None:
        wake_ups.notify(Stage.PREPARE, run_id, new.filename)
    return accepted


def _settle(
    connection: Connection,
    store: DocumentStore,
    new: NewDocument,
    path: Path,
    options: IntakeOptions,
    decrypted: Path | None,
) -> tuple[Accepted, str | None]:
    """A new document, or the known one; looks again where a delete or reprocess came between."""
    while True:
        with connection.begin():
            known = document_rows.find_by_content(connection, new.collection, new.sha256)
        if known is None:
            return _first(connection, store, new, path, options, decrypted)
        try:
            return _again(connection, store, known, options, decrypted)
        except (AlreadyActive, NotFound):
            continue


def _first(
    connection: Connection,
    store: DocumentStore,
    new: NewDocument,
    path: Path,
    options: IntakeOptions,
    decrypted: Path | None,
) -> tuple[Accepted, str]:
    document_id = new_id()
    key = working_key(document_id) if decrypted else source_key(new.sha256)
    store.put_file(key, decrypted or path)
    with connection.begin():
        document_rows.insert_document(connection, new, key, document_id)
        run_id = runs.add_run(
            # The first run has no earlier one whose pages it could take over.
            connection, document_id, options.run, options.priority, reuse_pages=False,
        )  # fmt: skip
    return Accepted(document_id, RunState.QUEUED, duplicate=False, queued=True), run_id


def _again(
    connection: Connection,
    store: DocumentStore,
    known: StoredDocument,
    options: IntakeOptions,
    decrypted: Path | None,
) -> tuple[Accepted, str | None]:
    if known.active or known.state is RunState.PROCESSED:
        if known.fingerprint != options.run.fingerprint:
            raise OptionsDiffer(
                f"This file is document {known.id} already, with other options; "
                f"use reprocess to read it anew."
            )
        return Accepted(known.id, known.state, duplicate=True, queued=False), None
    if decrypted is not None:
        adopt_copy(connection, store, known, decrypted)
    with connection.begin():
        run_id = runs.add_run(connection, known.id, options.run, options.priority)
    return Accepted(known.id, RunState.QUEUED, duplicate=True, queued=True), run_id
