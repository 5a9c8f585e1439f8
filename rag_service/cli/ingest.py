"""The command `ingest`: sends files and folders to the service, and can wait for the results."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_service.cli import field_text
from rag_service.cli.common_options import Collection, Json, Ocr, Parser, PasswordFile, Wait, begin
from rag_service.cli.input_files import find_files, unreadable
from rag_service.cli.output import note, one_line, print_json, print_table
from rag_service.errors import (
    OUTAGES,
    Forbidden,
    InvalidOptions,
    RagServiceError,
    Unauthorized,
)
from rag_service.runtime.plural import counted

if TYPE_CHECKING:
    from rag_service.client import Client, Sent
    from rag_service.knowledgebase.views import DocumentView

_PARALLEL = 4
_STDIN = Path("-")
_STDIN_NAME = "stdin"
_INTERVAL = 1.0
_SKIPPED_SHOWN = 20
_STRICT = frozenset({"page_without_text", "page_truncated"})
_FAILED, _UNREACHABLE = 1, 3


class PriorityName(StrEnum):
    """The priority of a document."""

    INTERACTIVE = "interactive"
    BULK = "bulk"


Strict = Annotated[
    bool,
    typer.Option("--strict", help="Wait, and exit 1 if a page has no text or its text was cut."),
]
Priority = Annotated[
    PriorityName | None, typer.Option(help="interactive goes before bulk (the default).")
]


@dataclass
class _Upload:
    """A file and the result of sending it."""

    path: Path
    sent: Sent | None = None
    error: RagServiceError | None = None
    view: DocumentView | None = None


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(ingest)


def _require_paths(paths: list[Path]) -> list[Path]:
    for path in paths:
        if path != _STDIN and not path.exists():
            raise typer.BadParameter(f"Path '{path}' does not exist.")
    return paths


def ingest(
    paths: Annotated[
        list[Path],
        typer.Argument(
            callback=_require_paths,
            metavar="PATH",
            help="Files, or folders with PDFs and images. `-` reads a document from stdin.",
        ),
    ],
    name: Annotated[
        str, typer.Option(help="The name of the document that is read from stdin.")
    ] = _STDIN_NAME,
    wait: Wait = False,
    strict: Strict = False,
    collection: Collection = None,
    parser: Parser = None,
    ocr: Ocr = None,
    priority: Priority = None,
    password_file: PasswordFile = None,
    as_json: Json = False,
) -> None:
    """Send files or folders to the service."""
    from rag_service.cli.passwords import read_password
    from rag_service.client import Client

    settings = begin()
    options = {
        "collection": collection, "parser": parser, "ocr": ocr, "priority": priority,
        "password": read_password(password_file),
    }  # fmt: skip
    fields = {name: str(value) for name, value in options.items() if value is not None}
    with Client(settings) as client:
        client.require_answer()
        found = find_files(path for path in paths if path != _STDIN)
        uploads = [_Upload(refused.path, error=refused.error) for refused in found.refused]
        uploads += _send_all(client, found.files, fields)
        if _STDIN in paths:
            uploads.append(_send_stdin(client, name, fields))
        if wait or strict:
            _await(client, uploads)
    _report(uploads, as_json=as_json)
    _note_skipped(found.skipped)
    status = _status(uploads, strict=strict)
    if status:
        raise typer.Exit(status)


def _send_all(client: Client, files: list[Path], fields: dict[str, str]) -> Iterator[_Upload]:
    """Send the files in parallel; a refused file does not stop the others."""
    pool = ThreadPoolExecutor(_PARALLEL, thread_name_prefix="upload")
    try:
        for upload in pool.map(lambda path: _send(client, path, fields), files):
            note(f"{one_line(str(upload.path))}: {_result(upload)}")
            yield upload
    finally:
        # After an interruption no upload starts; closing the client ends those in progress.
        pool.shutdown(wait=False, cancel_futures=True)


def _send_stdin(client: Client, name: str, fields: dict[str, str]) -> _Upload:
    """Send what stdin contains as a document of this name.

    It is copied to a temporary file first, because an upload may have to be repeated.
    """
    if sys.stdin.isatty():
        note("Reading a document from the terminal; Ctrl-D ends it.")
    with tempfile.TemporaryDirectory(prefix="rag_service-") as folder:
        copy = Path(folder, Path(name).name or _STDIN_NAME)
        with copy.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        upload = replace(_send(client, copy, fields), path=_STDIN)
    note(f"{upload.path}: {_result(upload)}")
    return upload


def _send(client: Client, path: Path, fields: dict[str, str]) -> _Upload:
    """Send one file. Raises InvalidOptions, Unauthorized, Forbidden: they refuse every file."""
    try:
        return _Upload(path, sent=client.send(path, fields, on_backlog=_note_backlog))
    except (InvalidOptions, Unauthorized, Forbidden):
        raise
    except RagServiceError as error:
        return _Upload(path, error=error)
    except OSError as error:
        return _Upload(path, error=unreadable(error))


def _note_skipped(paths: list[Path]) -> None:
    """Print how many files of the folders were skipped, and the names of the first ones."""
    if not paths:
        return
    shown = ", ".join(one_line(str(path)) for path in paths[:_SKIPPED_SHOWN])
    rest = len(paths) - _SKIPPED_SHOWN
    more = f" and {rest} more" if rest > 0 else ""
    note(
        f"{counted(len(paths), 'file')} skipped (no PDF or image by name, or a link to a folder): "
        f"{shown}{more}."
    )


def _note_backlog(seconds: float) -> None:
    note(f"The service's queue is full; trying again in {seconds:g} s.")


def _result(upload: _Upload) -> str:
    if upload.sent is None:
        return upload.error.message if upload.error else ""
    known = ", already known" if upload.sent.duplicate else ""
    return f"{upload.sent.status}{known} ({upload.sent.id})"


def _await(client: Client, uploads: list[_Upload]) -> None:
    """Wait for the documents; at a terminal, ask for the passwords of encrypted ones."""
    from rag_service.cli.passwords import ask_and_redo, can_ask, locked
    from rag_service.cli.progress import follow

    ids = [upload.sent.id for upload in uploads if upload.sent]
    ended = follow(ids, client.document, interval=_INTERVAL)
    if can_ask():
        redone = [ask_and_redo(client, view, {}) for view in locked(ended.values())]
        again = [redo.id for redo in redone if redo is not None]
        ended |= follow(again, client.document, interval=_INTERVAL)
    for upload in uploads:
        upload.view = ended.get(upload.sent.id) if upload.sent else None


def _report(uploads: list[_Upload], *, as_json: bool) -> None:
    if as_json:
        for upload in uploads:
            print_json(_object(upload))
        return
    if not uploads:
        note("No PDF, PNG, JPEG, TIFF or WebP file was found; no file was sent.")
    columns = ("file", "id", "status", "duplicate", "pages", "warnings", "error")
    print_table(columns, [_row(upload) for upload in uploads])


def _row(upload: _Upload) -> tuple[object, ...]:
    sent, view = upload.sent, upload.view
    if sent is None:
        error = upload.error
        return (upload.path, None, "refused", *(None,) * 3, error and f"{error.code}: {error}")
    duplicate = "yes" if sent.duplicate else "no"
    if view is None:
        return (upload.path, sent.id, sent.status, duplicate, *(None,) * 3)
    return (
        upload.path, sent.id, field_text.state(view), duplicate,
        field_text.pages(view.latest_run.pages),
        field_text.warning_counts(view.warnings), field_text.error(view.latest_run.error),
    )  # fmt: skip


def _object(upload: _Upload) -> dict[str, Any]:
    sent, error, view = upload.sent, upload.error, upload.view
    return {
        "file": str(upload.path),
        "id": sent and sent.id,
        "status": sent and sent.status,
        "duplicate": sent and sent.duplicate,
        "error": error and {"code": error.code, "message": error.message},
        "document": view and view.model_dump(mode="json"),
    }


def _status(uploads: list[_Upload], *, strict: bool) -> int:
    errors = [upload.error for upload in uploads if upload.error]
    if any(isinstance(error, OUTAGES) for error in errors):
        return _UNREACHABLE
    views = [upload.view for upload in uploads if upload.view]
    failed = [view for view in views if not field_text.succeeded(view)]
    cut = [view for view in views if any(w.code in _STRICT for w in view.warnings)]
    return _FAILED if not uploads or errors or failed or (strict and cut) else 0
