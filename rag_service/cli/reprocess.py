"""The command `reprocess`: redoes documents by id or by what became of them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_service.cli import words
from rag_service.cli.options import Collection, Json, Ocr, Parser, PasswordFile, Wait, begin
from rag_service.cli.output import print_json, print_table

if TYPE_CHECKING:
    from rag_service.client import Client
    from rag_service.knowledgebase.views import DocumentView, Redo

_INTERVAL = 1.0
_COLUMNS = ("id", "file", "action", "pages kept", "pages read again")
_ACTIONS = {
    "queued": "queued",
    "would_queue": "would be queued",
    "skipped_active": "skipped, at work already",
    "nothing_to_redo": "nothing to redo",
}


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(reprocess)


def reprocess(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Documents by their id.")
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Documents whose newest run failed.")
    ] = False,
    error: Annotated[
        str | None, typer.Option(help="Documents whose newest run, or a page, has this code.")
    ] = None,
    collection: Collection = None,
    parser: Parser = None,
    ocr: Ocr = None,
    all_pages: Annotated[
        bool, typer.Option("--all-pages", help="Read good pages again too.")
    ] = False,
    password_file: PasswordFile = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")
    ] = False,
    wait: Wait = False,
    as_json: Json = False,
) -> None:
    """Redo documents; good pages are kept, the old text stays until the new one is there."""
    from rag_service.cli.passwords import read_password
    from rag_service.client import Client

    settings = begin()
    selectors = {"ids": ids or [], "failed": failed, "error": error, "collection": collection}
    changes = {"parser": parser, "ocr": ocr, "all_pages": all_pages}
    if password_file and not ids:
        raise typer.BadParameter("needs the IDs of the documents.", param_hint="--password-file")
    with Client(settings) as client:
        if ids and not dry_run:
            redone = _redo_named(client, selectors, changes, read_password(password_file))
        else:
            redone = client.redo_many(selectors | changes | {"dry_run": dry_run})
        _report(redone, as_json=as_json)
        if wait:
            _await(client, redone, as_json=as_json)


def _redo_named(
    client: Client, selectors: dict[str, Any], changes: dict[str, Any], password: str | None
) -> list[Redo]:
    """With the password, or with one that is asked for where a document needs it."""
    from rag_service.cli.passwords import ask_and_redo, can_ask, locked

    if password is None and not can_ask():
        return client.redo_many(selectors | changes)
    # Each by itself, once all ids are known and narrowed by the other selectors.
    meant = client.redo_many(selectors | changes | {"dry_run": True})
    ids = [redo.id for redo in meant]
    if password is not None:
        return [client.redo(one, changes | {"password": password}) for one in ids]
    needy = {view.id: view for view in locked(client.document(one) for one in ids)}
    asked = [ask_and_redo(client, view, changes) for view in needy.values()]
    rest = [one for one in ids if one not in needy]
    redone = client.redo_many(changes | {"ids": rest}) if rest else []
    return redone + [redo for redo in asked if redo is not None]


def _report(redone: list[Redo], *, as_json: bool) -> None:
    if as_json:
        for redo in redone:
            print_json(redo)
        return
    print_table(_COLUMNS, [_row(redo) for redo in redone])
    counts = Counter(redo.action for redo in redone)
    listed = ", ".join(f"{n} {_ACTIONS[action]}" for action, n in counts.most_common())
    typer.echo(listed[:1].upper() + listed[1:] + "." if listed else "Nothing to redo.")


def _row(redo: Redo) -> tuple[object, ...]:
    return (redo.id, redo.filename, _ACTIONS[redo.action], redo.pages_reused, redo.pages_redone)


def _await(client: Client, redone: list[Redo], *, as_json: bool) -> None:
    from rag_service.cli.watch import follow

    ids = [redo.id for redo in redone if redo.run_id is not None]
    views = list(follow(ids, client.document, interval=_INTERVAL).values())
    if as_json:
        for view in views:
            print_json(view)
    else:
        print_table(("id", "file", "status", "pages", "error"), [_outcome(v) for v in views])
    if not all(words.succeeded(view) for view in views):
        raise typer.Exit(1)


def _outcome(view: DocumentView) -> tuple[object, ...]:
    run = view.latest_run
    return (
        view.id,
        view.filename,
        words.state(view),
        words.pages(run.pages),
        words.error(run.error),
    )
