"""The command `run`: processes files with a temporary service and prints their text."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rag_service.cli import document_formats, field_text
from rag_service.cli.checks import check_service, check_transport, check_worker, server_warning
from rag_service.cli.common_options import Ocr, Parser, PasswordFile, begin
from rag_service.cli.document_formats import SUFFIXES, Format
from rag_service.cli.input_files import require_regular, unreadable
from rag_service.cli.local_service import LocalService
from rag_service.cli.output import note, print_table, write_out
from rag_service.cli.passwords import read_password
from rag_service.cli.signals import stop_in_order
from rag_service.errors import (
    DocumentError,
    NotFound,
    RagServiceError,
    RequestError,
    Unreadable,
)
from rag_service.states import OcrMode, WaitingFor

if TYPE_CHECKING:
    from rag_service.config.options import Settings
    from rag_service.documents.incoming_file import IncomingFile
    from rag_service.documents.intake import IntakeOptions
    from rag_service.knowledgebase.views import DocumentView, PageView

_INTERVAL = 0.25
_PAGES = 100
# Short, because the data folder is deleted afterwards.
_DRAIN_SECONDS = 5.0
# Page states; those in the second line have a column only if a document has such pages.
_USUAL = ("native", "ocr", "blank")
_UNUSUAL = ("no_text", "truncated", "failed")


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(run)


@dataclass
class _Input:
    """A file, its label in the output, and its document or the error that refused it."""

    path: Path
    label: str
    id: str | None = None
    error: RagServiceError | None = None
    view: DocumentView | None = None

    @property
    def succeeded(self) -> bool:
        return self.view is not None and field_text.succeeded(self.view)


def run(
    files: Annotated[
        list[Path], typer.Argument(exists=True, dir_okay=False, help="PDFs and images.")
    ],
    ocr: Ocr = None,
    parser: Parser = None,
    form: Annotated[Format, typer.Option("--format", help="The output format.")] = Format.MD,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    password_file: PasswordFile = None,
    output: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help="Write a file per document into this folder, not to stdout."
        ),
    ] = None,
) -> None:
    """Process files and print their text; all servers that it needs are started and stopped."""
    settings = begin()
    # Wrong settings and options are reported before anything is started.
    _check(settings, ocr)
    _options(settings, ocr, parser)
    password = read_password(password_file)
    form = Format.JSON if as_json else form
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
    with _temporary_folder() as folder:
        service = LocalService(settings, folder, durable=False)
        with stop_in_order(service.kill), service:
            note("Starting …")
            settings = _start(settings, service, folder, ocr)
            inputs = _add_files(settings, files, _options(settings, ocr, parser), password)
            _follow(settings, inputs, service)
            _print(inputs, form, output)
    _report(inputs)
    if not all(one.succeeded for one in inputs):
        raise typer.Exit(1)


def _check(settings: Settings, ocr: OcrMode | None) -> None:
    """Raise ConfigurationError. Without OCR no server needs to be set."""
    from rag_service.config.loader import warn_of_doubtful_settings
    from rag_service.runtime.start_limits import require_start_limits

    require_start_limits()
    check_worker(settings)
    if ocr is not OcrMode.OFF:
        check_transport(settings)
        warn_of_doubtful_settings(settings)


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Yield a folder that the next start removes if this process is killed."""
    from rag_service.embedded.folder import RuntimeFolder

    folder = RuntimeFolder(Path(tempfile.gettempdir()))
    try:
        yield folder.path
    finally:
        folder.remove()


def _options(settings: Settings, ocr: OcrMode | None, parser: str | None) -> IntakeOptions:
    from rag_service.documents.intake import check_options

    return check_options(settings, ocr=ocr, parser=parser, priority="interactive")


def _start(
    settings: Settings, service: LocalService, folder: Path, ocr: OcrMode | None
) -> Settings:
    """Start the servers, and the programs without waiting for them."""
    from rag_service.cli.start_plan import StartPlan

    own_ocr = settings.needs_ocr_server and ocr is not OcrMode.OFF
    environment = _environment(settings, folder, own_ocr=own_ocr)
    if ocr is OcrMode.OFF:
        # No page is sent, so maintenance must not require a key for RunPod.
        environment["RAG_SERVICE_OCR_TRANSPORT"] = "direct"
    settings = service.start_servers(environment)
    check_service(settings)
    plan = StartPlan(settings, folder / "logs", _DRAIN_SECONDS)
    programs = plan.prepare_only() if ocr is OcrMode.OFF else plan.workers()
    service.start([plan.ocr_server(), *programs] if own_ocr else programs)
    if ocr is not OcrMode.OFF and not own_ocr and (wrong := server_warning(settings)):
        note(f"Warning: {wrong}")
    return settings


def _environment(settings: Settings, folder: Path, *, own_ocr: bool) -> dict[str, str]:
    """Return the variables that override the settings of this process and its children."""
    from rag_service.cli.start_plan import embedded_ocr_environment
    from rag_service.embedded.folder import free_port

    environment = {}
    if settings.database.url is None:
        # Bytes belong to the rows that name them, and the database is temporary.
        environment["RAG_SERVICE_DATA_DIR"] = str(folder)
        environment["RAG_SERVICE_STORAGE_URL"] = (folder / "documents").as_uri()
    if own_ocr:
        environment |= embedded_ocr_environment(settings, "127.0.0.1", free_port())
    return environment


def _add_files(
    settings: Settings, files: list[Path], options: IntakeOptions, password: str | None
) -> list[_Input]:
    """Add the files as documents while the workers start."""
    from rag_service.documents.storage import DocumentStore

    store = DocumentStore(settings)

    def add(path: Path) -> str:
        from rag_service.documents import intake
        from rag_service.documents.incoming_file import IncomingFile

        require_regular(path)
        folder = store.incoming()
        with IncomingFile(settings, folder) as incoming:
            with path.open("rb") as file:
                incoming.copy_from(file)
            with _unlocked(settings, incoming, password, folder) as decrypted:
                return intake.accept(
                    settings, store, incoming, path.name, options, decrypted=decrypted
                ).id

    return [_add_file(path, label, add) for path, label in labelled(files)]


def labelled(files: list[Path]) -> list[tuple[Path, str]]:
    """Return each file once, with its name, or with its path if two files have the same name."""
    files = list(dict.fromkeys(files))
    names = Counter(path.name for path in files)
    return [(path, path.name if names[path.name] == 1 else str(path)) for path in files]


@contextmanager
def _unlocked(
    settings: Settings, incoming: IncomingFile, password: str | None, folder: Path
) -> Iterator[Path | None]:
    """Yield a decrypted copy of an encrypted PDF, or None without a password or encryption."""
    if password is None:
        yield None
        return
    import asyncio

    from rag_service.documents.decryption import unlocked

    with asyncio.Runner() as loop:
        copy = unlocked(settings, incoming.path, incoming.finish(), password, folder)
        path = loop.run(copy.__aenter__())
        try:
            yield path
        finally:
            loop.run(copy.__aexit__(None, None, None))


def _add_file(path: Path, label: str, add: Callable[[Path], str]) -> _Input:
    """Add one file; its refusal does not stop the others."""
    try:
        return _Input(path, label, id=add(path))
    except (DocumentError, RequestError, Unreadable) as error:
        return _Input(path, label, error=error)
    except OSError as error:
        return _Input(path, label, error=unreadable(error))


def _follow(settings: Settings, inputs: list[_Input], service: LocalService) -> None:
    from rag_service.cli.progress import follow
    from rag_service.knowledgebase import document_queries

    def fetch(document_id: str) -> DocumentView:
        view = document_queries.get_document(document_id, settings.page_server)
        if view is None:
            raise NotFound()
        # The worker is only starting; `check` reports one that ends.
        starting = view.waiting_for is WaitingFor.WORKER
        return view.model_copy(update={"waiting_for": None}) if starting else view

    ids = [one.id for one in inputs if one.id is not None]
    ended = follow(ids, fetch, interval=_INTERVAL, check=service.check)
    for one in inputs:
        view = ended.get(one.id or "")
        # Two files with the same bytes are one document; each is shown under its own name.
        one.view = view and view.model_copy(update={"filename": one.label})


def _print(inputs: list[_Input], form: Format, output: Path | None) -> None:
    """Write each file's text; for a failed document the good pages."""
    taken: set[str] = set()
    for one in inputs:
        if one.view is None:
            continue
        pieces = document_formats.document(one.view, _pages(one.view), form)
        if output is None:
            if not write_out(pieces):
                return
        else:
            with _free_name(output, one.path.stem, SUFFIXES[form], taken).open("w") as file:
                file.writelines(pieces)


def _pages(view: DocumentView) -> Iterator[PageView]:
    from rag_service.knowledgebase import page_queries

    run_id, after = page_queries.shown_run_id(view.id), 0
    while run_id and (batch := page_queries.list_pages(run_id, after=after, limit=_PAGES)):
        yield from batch
        after = batch[-1].number


def _free_name(folder: Path, stem: str, suffix: str, taken: set[str]) -> Path:
    """Return a path that no other document of this command has; an older file is replaced."""
    name, number = f"{stem}{suffix}", 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}{suffix}"
    taken.add(name)
    return folder / name


def _report(inputs: list[_Input]) -> None:
    """Print a table with a row per file on stderr."""
    kinds = [*_USUAL, *(kind for kind in _UNUSUAL if any(_count(one, kind) for one in inputs))]
    columns = ("file", "id", "status", *kinds, "seconds", "warnings", "error")
    print_table(columns, [_row(one, kinds) for one in inputs], to_stderr=True)


def _count(one: _Input, kind: str) -> int | None:
    return getattr(one.view.pages, kind) if one.view else None


def _row(one: _Input, kinds: list[str]) -> tuple[object, ...]:
    view, counts = one.view, [_count(one, kind) for kind in kinds]
    if view is None:
        error = f"{one.error.code}: {one.error.message}" if one.error else ""
        return (one.label, one.id, "refused", *counts, None, None, error)
    return (
        one.label, view.id, field_text.state(view), *counts,
        view.run_seconds, field_text.warning_counts(view.warnings), field_text.error(view.error),
    )  # fmt: skip
