"""The commands `cancel` and `delete`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from rag_service.cli.common_options import Ids, Json, open_client
from rag_service.cli.output import one_line, print_json, print_table
from rag_service.errors import NotFound

if TYPE_CHECKING:
    from rag_service.client import Client

_NOT_FOUND = "not found"
_NAMES_SHOWN = 5


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(cancel)
    app.command()(delete)


def cancel(ids: Ids, as_json: Json = False) -> None:
    """Cancel the current run of documents; finished pages are kept."""
    with open_client() as client:

        def cancel_one(document_id: str) -> str:
            return "cancelled" if client.cancel(document_id) else "no run to cancel"

        _for_each(ids, cancel_one, as_json=as_json)


def delete(
    ids: Ids,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Delete documents with their pages and files."""
    with open_client() as client:
        if not yes:
            _require_consent(_filenames(client, ids))

        def delete_one(document_id: str) -> str:
            client.delete(document_id)
            return "deleted"

        _for_each(ids, delete_one, as_json=as_json)


def _filenames(client: Client, ids: list[str]) -> list[str]:
    """Return the filenames of the documents. Raises NotFound for the first unknown one."""
    return [one_line(client.document(document_id).filename) for document_id in dict.fromkeys(ids)]


def _require_consent(filenames: list[str]) -> None:
    if not sys.stdin.isatty():
        raise typer.BadParameter("use --yes when stdin is not a terminal.", param_hint="delete")
    shown = ", ".join(filenames[:_NAMES_SHOWN])
    more = f" and {len(filenames) - _NAMES_SHOWN} more" if len(filenames) > _NAMES_SHOWN else ""
    typer.confirm(f"Delete {shown}{more}?", abort=True, err=True)


def _for_each(ids: list[str], action: Callable[[str], str], *, as_json: bool) -> None:
    """Apply the action to each document; an unknown ID does not stop the others, but exits 1."""
    results = {document_id: _result(action, document_id) for document_id in dict.fromkeys(ids)}
    if as_json:
        for document_id, result in results.items():
            print_json({"id": document_id, "result": result})
    else:
        print_table(("id", "result"), results.items())
    if _NOT_FOUND in results.values():
        raise typer.Exit(1)


def _result(action: Callable[[str], str], document_id: str) -> str:
    try:
        return action(document_id)
    except NotFound:
        return _NOT_FOUND
