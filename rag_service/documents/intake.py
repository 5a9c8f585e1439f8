"""Intake of documents: check, store bytes, insert document and run, notify workers."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from rag_service.config.options import Settings
from rag_service.database import document_rows
from rag_service.database.document_rows import NewDocument, StoredDocument
from rag_service.database.engine import Connection, begin
from rag_service.database.models import new_id
from rag_service.database.storable_text import clean
from rag_service.documents.decryption import remove_if_unused, store_copy
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
COLLECTION_PATTERN = r"^\w[\w .:/@+-]{0,127}$"
_COLLECTION = re.compile(COLLECTION_PATTERN)
# ZERO WIDTH NON-JOINER and ZERO WIDTH JOINER.
_JOINERS = "\u200c\u200d"
_LONGEST_NAME = 255


@dataclass(frozen=True, slots=True)
class IntakeOptions:
    """The checked options of an upload."""

    collection: str
    run: RunOptions
    priority: Priority


@dataclass(frozen=True, slots=True)
class Accepted:
    """The result of an upload; `queued`: it added a run."""

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
    """Return the options, with defaults for those not given. Raises InvalidOptions."""
    collection = collection or DEFAULT_COLLECTION
    if not _COLLECTION.fullmatch(collection):
        raise InvalidOptions(
            "collection: must begin with a letter, a digit or _ and have at most 128 letters, "
            "digits, spaces and _ . : / @ + -"
        )
    return IntakeOptions(
        collection, run_options(settings, parser=parser, ocr=ocr), _priority(priority)
    )


def run_options(
    settings: Settings, *, parser: str | None = None, ocr: str | None = None
) -> RunOptions:
    """Return the options of a run under the current settings. Raises InvalidOptions."""
    try:
        mode = OcrMode(ocr or OcrMode.AUTO)
    except ValueError as error:
        raise InvalidOptions(f"ocr: {ocr!r} is not one of auto, force, off.") from error
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
        raise InvalidOptions(f"priority: {name!r} is not one of interactive, bulk.") from error


def display_name(name: str | None) -> str:
    """Return the file name without its folders, for display only; it is never used as a path.

    Invisible marks, such as those that turn the direction of the text, are removed: with one,
    `exe.pdf` can be shown as another name. The joiners of Persian and Indic words stay.
    """
    visible = "".join(letter for letter in clean(name or "") if not _is_invisible(letter))
    base = " ".join(PurePosixPath(PureWindowsPath(visible).name).name.split())
    return base[:_LONGEST_NAME] or "unnamed"


def _is_invisible(letter: str) -> bool:
    return unicodedata.category(letter) == "Cf" and letter not in _JOINERS


def require_backlog_space(settings: Settings, priority: Priority) -> None:
    """Raise BacklogFull if limits.max_backlog documents of this priority are waiting.

    Each priority has a backlog of its own, so bulk work never refuses an interactive document.
    """
    most = settings.limits.max_backlog
    with begin() as connection:
        waiting = runs.backlog(connection, most, priority)
    if waiting >= most:
        name = priority.name.lower()
        raise BacklogFull(
            f"At least {most} {name} documents are waiting (limits.max_backlog); try again later."
        )


def accept(
    settings: Settings,
    store: DocumentStore,
    file: IncomingFile,
    filename: str | None,
    options: IntakeOptions,
    *,
    decrypted: Path | None = None,
) -> Accepted:
    """Store the upload and add a run, or return the document that already has this content.

    `decrypted`: the path of a decrypted copy, which is stored for this document alone.
    Raises EmptyFile, UnsupportedType, OptionsDiffer, BacklogFull, StorageUnavailable.
    """
    media_type = file.finish()
    require_backlog_space(settings, options.priority)
    new = NewDocument(
        collection=options.collection,
        sha256=file.sha256,
        filename=display_name(filename),
        media_type=media_type,
        bytes=file.bytes,
    )
    with document_rows.content_lock(new.sha256) as connection:
        accepted, run_id, before = _store_or_find(
            connection, store, new, file.path, options, decrypted
        )
    if run_id is not None:
        wake_ups.notify(Stage.PREPARE, run_id, new.filename)
        if before is not None and decrypted is not None:
            remove_if_unused(store, before)
    return accepted


def _store_or_find(
    connection: Connection,
    store: DocumentStore,
    new: NewDocument,
    path: Path,
    options: IntakeOptions,
    decrypted: Path | None,
) -> tuple[Accepted, str | None, StoredDocument | None]:
    """Add a new document, or use the existing one; repeat if it changed in between.

    Return the outcome, the run that was added, and the existing document as it was before.
    """
    while True:
        with connection.begin_nested():
            document = document_rows.find_by_content(connection, new.collection, new.sha256)
        if document is None:
            return *_add_document(connection, store, new, path, options, decrypted), None
        try:
            with connection.begin_nested():
                used = _use_existing(connection, store, document, new, path, options, decrypted)
            return *used, document
        except (AlreadyActive, NotFound):
            continue


def _add_document(
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
    document_rows.insert_document(connection, new, key, document_id)
    run_id = runs.add_run(
        # The first run has no earlier run whose pages it could reuse.
        connection, document_id, options.run, options.priority, reuse_pages=False,
    )  # fmt: skip
    return Accepted(document_id, RunState.QUEUED, duplicate=False, queued=True), run_id


def _use_existing(
    connection: Connection,
    store: DocumentStore,
    document: StoredDocument,
    new: NewDocument,
    path: Path,
    options: IntakeOptions,
    decrypted: Path | None,
) -> tuple[Accepted, str | None]:
    _restore_bytes(store, document, new, path)
    if document.active or document.state is RunState.PROCESSED:
        if document.fingerprint != options.run.fingerprint:
            raise OptionsDiffer(
                f"This file is already document {document.id}, with other options; "
                "use reprocess to read it again."
            )
        return Accepted(document.id, document.state, duplicate=True, queued=False), None
    if decrypted is not None:
        store_copy(connection, store, document, decrypted)
    run_id = runs.add_run(connection, document.id, options.run, options.priority)
    return Accepted(document.id, RunState.QUEUED, duplicate=True, queued=True), run_id


def _restore_bytes(
    store: DocumentStore, document: StoredDocument, new: NewDocument, path: Path
) -> None:
    """Store the bytes again if those of the existing document are missing, cut off or in doubt."""
    if document.source_key != source_key(new.sha256):
        return
    in_doubt = document.state is RunState.FAILED
    if in_doubt or store.size(document.source_key) != new.bytes:
        store.put_file(document.source_key, path)
