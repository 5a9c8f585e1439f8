"""The command `status`: a table of documents, and a line for each OCR server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rag_service.cli import field_text
from rag_service.cli.common_options import Collection, Json, open_client
from rag_service.cli.output import one_line, print_json, print_table
from rag_service.errors import NotFound
from rag_service.states import RunState

if TYPE_CHECKING:
    from rag_service.client import Client
    from rag_service.knowledgebase.views import DocumentView

_COLUMNS = ("id", "file", "collection", "status", "pages", "waits", "error", "warnings", "added")
# Shown only if a document had jobs on a service that is paid by the second.
_COST = "cost"
_LIMIT = 50

# A document ID and what the service has under it.
_Found = tuple[str, "DocumentView | None"]


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(status)


def status(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]...", help="Document IDs. Default: the newest documents."),
    ] = None,
    wanted: Annotated[
        RunState | None, typer.Option("--status", help="Only documents in this state.")
    ] = None,
    collection: Collection = None,
    error: Annotated[
        str | None, typer.Option(help="Only documents whose newest run has this error code.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="List at most this many documents.")] = _LIMIT,
    as_json: Json = False,
) -> None:
    """Show the state of documents, the newest first, and of the OCR servers."""
    with open_client() as client:
        if ids:
            found = [(one, _find(client, one)) for one in dict.fromkeys(ids)]
        else:
            found = _newest(client, wanted, collection, error, limit)
        servers = [] if ids or as_json else client.servers()
    if as_json:
        for _, view in found:
            if view:
                print_json(view)
    else:
        _print_documents(found, None if ids else limit)
        for server in servers:
            typer.echo(one_line(field_text.server(server)))
    if any(view is None for _, view in found):
        raise typer.Exit(1)


def _find(client: Client, document_id: str) -> DocumentView | None:
    try:
        return client.document(document_id)
    except NotFound:
        typer.echo(f"rag-service: No document {document_id}.", err=True)
        return None


def _newest(
    client: Client, wanted: RunState | None, collection: str | None, error: str | None, limit: int
) -> list[_Found]:
    filters = {"status": wanted, "collection": collection, "error": error}
    given = {name: str(value) for name, value in filters.items() if value is not None}
    return [(view.id, view) for view in client.documents(given, limit)]


def _print_documents(found: list[_Found], limit: int | None) -> None:
    """Print the table and the counts by status; `limit` is None if documents were named."""
    from rag_service.knowledgebase.document_markdown import cost_of

    rows = [_row(document_id, view) for document_id, view in found]
    costs = [cost_of(view.cost) if view else "" for _, view in found]
    if any(costs):
        rows = [(*row, cost) for row, cost in zip(rows, costs, strict=True)]
    print_table((*_COLUMNS, _COST) if any(costs) else _COLUMNS, rows)
    cut = f" (the newest {limit}; --limit shows more)" if len(found) == limit else ""
    typer.echo(field_text.status_counts(view for _, view in found if view) + cut)


def _row(document_id: str, view: DocumentView | None) -> tuple[object, ...]:
    if view is None:
        return (document_id, None, None, "not found", *(None,) * 5)
    return (
        view.id, view.filename, view.collection, field_text.state(view),
        field_text.pages(view.latest_run.pages), field_text.waiting(view),
        field_text.error(view.latest_run.error), field_text.warning_counts(view.warnings),
        field_text.moment(view.created_at),
    )  # fmt: skip
