"""The command `status`: documents, what waits, what failed by cause, and the OCR servers."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from rag_service.cli import field_text
from rag_service.cli.common_options import Collection, Json, complete_code, open_client
from rag_service.cli.document_table import Found, print_documents
from rag_service.cli.output import note, one_line, print_json, print_lines, print_table
from rag_service.errors import OUTAGES, NotFound
from rag_service.states import RunState

if TYPE_CHECKING:
    from rag_service.client import Client, FaultView
    from rag_service.knowledgebase.views import DocumentView, ServerView, SummaryView

_LIMIT = 50
# Faults of health that the lines of the stages and servers say.
_SHOWN_ELSEWHERE = {"prepare_held", "ocr_held", "starved"}
_WATCH_SECONDS = 2.0
_CLEAR = "\x1b[H\x1b[2J\x1b[3J"


@dataclass(frozen=True)
class _Question:
    """What `status` was asked for."""

    ids: list[str]
    filters: dict[str, str]
    limit: int


@dataclass(frozen=True)
class _Answer:
    """What the service answered; without the parts after `found` if documents were named."""

    found: list[Found]
    summary: SummaryView | None = None
    servers: list[ServerView] = field(default_factory=list)
    faults: list[FaultView] = field(default_factory=list)


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(status)


def status(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ID",
            help="Document IDs, or their unique first digits. Default: the newest documents.",
        ),
    ] = None,
    wanted: Annotated[
        RunState | None, typer.Option("--status", help="Only documents in this state.")
    ] = None,
    collection: Collection = None,
    error: Annotated[
        str | None,
        typer.Option(
            autocompletion=complete_code,
            help="Only documents whose newest run, or a page of it, has this error code.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="List at most this many documents.")] = _LIMIT,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it again every 2 s until Ctrl-C.")
    ] = False,
    wide: Annotated[
        bool, typer.Option("--wide", help="Cut no ID or text to the width of the terminal.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the state of documents, the newest first, of the work that waits and of the servers."""
    filters = {"status": wanted, "collection": collection, "error": error}
    given = {name: str(value) for name, value in filters.items() if value is not None}
    question = _Question(list(dict.fromkeys(ids or [])), given, limit)
    with open_client() as client:
        while watch:
            _show_again(client, question, wide=wide, as_json=as_json)
            time.sleep(_WATCH_SECONDS)
        answer = _ask(client, question)
    _print(answer, question, wide=wide, as_json=as_json)
    if any(view is None for _, view in answer.found):
        raise typer.Exit(1)


def _show_again(client: Client, question: _Question, *, wide: bool, as_json: bool) -> None:
    """Replace what the terminal shows; a service that does not answer is said, and asked again."""
    try:
        answer = _ask(client, question)
    except OUTAGES as error:
        note(f"rag-service: {error.message} Trying again.")
        return
    if sys.stdout.isatty():
        typer.echo(_CLEAR, nl=False)
    _print(answer, question, wide=wide, as_json=as_json)


def _ask(client: Client, question: _Question) -> _Answer:
    if question.ids:
        return _Answer([(one, _find(client, one)) for one in question.ids])
    found: list[Found] = [
        (view.id, view) for view in client.documents(question.filters, question.limit)
    ]
    return _Answer(found, client.summary(), client.servers(), client.faults())


def _find(client: Client, document_id: str) -> DocumentView | None:
    try:
        return client.document(document_id)
    except NotFound:
        typer.echo(f"rag-service: No document {document_id}.", err=True)
        return None


def _print(answer: _Answer, question: _Question, *, wide: bool, as_json: bool) -> None:
    if as_json:
        for _, view in answer.found:
            if view:
                print_json(view)
        return
    print_documents(answer.found, wide=wide)
    is_cut = not question.ids and len(answer.found) == question.limit
    cut = f" (the newest {question.limit}; --limit shows more)" if is_cut else ""
    typer.echo(field_text.status_counts(view for _, view in answer.found if view) + cut)
    if answer.summary is not None:
        _print_summary(answer.summary)
    for server in answer.servers:
        print_lines(one_line(field_text.server(server)))
    for fault in answer.faults:
        if fault.name not in _SHOWN_ELSEWHERE:
            print_lines(one_line(f"{fault.name}: {fault.message}"))


def _print_summary(summary: SummaryView) -> None:
    if text := field_text.waiting_work(summary):
        print_lines(text)
    for held in summary.held:
        print_lines(one_line(f"The {held.stage} stage is held. {held.message}"))
    for job in summary.reprocess_jobs:
        print_lines(field_text.reprocess_job(job))
    if rows := field_text.failures(summary):
        typer.echo("\nFailed documents by cause, and the command that selects them:")
        print_table(("error", "documents", "command"), [row[:3] for row in rows])
