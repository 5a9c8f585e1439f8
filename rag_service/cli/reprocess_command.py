"""The command `reprocess`: processes documents again, chosen by ID or by their results."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_service.cli import field_text
from rag_service.cli.common_options import (
    Json,
    Ocr,
    Parser,
    PasswordFile,
    begin,
    complete_code,
)
from rag_service.cli.output import print_json, print_table
from rag_service.cli.reprocess_jobs_command import follow_jobs

if TYPE_CHECKING:
    from rag_service.client import Client, Redone
    from rag_service.knowledgebase.views import DocumentView, Redo

_INTERVAL = 1.0
_COLUMNS = ("id", "file", "action", "pages kept", "pages read again")


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(reprocess)


def _moment(text: str) -> str:
    """Return a typed time in ISO 8601 for the API; without an offset it is local time."""
    try:
        return datetime.fromisoformat(text).astimezone().isoformat()
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(
            f"{text!r} is not a time such as 2026-03-01 or '2026-03-01 14:30'."
        ) from error


_DOCUMENTS = "Which documents (several options are combined with AND)"
_PAGES = "Which good pages of them are read again (the others are kept)"

_Failed = Annotated[
    bool,
    typer.Option("--failed", help="Documents whose newest run failed.", rich_help_panel=_DOCUMENTS),
]
_Error = Annotated[
    str | None,
    typer.Option(
        autocompletion=complete_code,
        help="Documents whose newest run, or a page of it, has this code.",
        rich_help_panel=_DOCUMENTS,
    ),
]
_Collection = Annotated[
    str | None, typer.Option(help="Documents of this collection.", rich_help_panel=_DOCUMENTS)
]
_Since = Annotated[
    str | None,
    typer.Option(
        parser=_moment, metavar="TIME", rich_help_panel=_DOCUMENTS,
        help="Documents whose newest run ended at this time or later.",
    ),
]  # fmt: skip
_Before = Annotated[
    str | None,
    typer.Option(
        parser=_moment, metavar="TIME", rich_help_panel=_DOCUMENTS,
        help="Documents whose newest run ended before this time.",
    ),
]  # fmt: skip
_ParserWas = Annotated[
    str | None,
    typer.Option(help="Documents whose text came from this parser.", rich_help_panel=_DOCUMENTS),
]
_Truncated = Annotated[
    bool, typer.Option("--truncated", help="Pages whose text was cut.", rich_help_panel=_PAGES)
]
_ModelWas = Annotated[
    str | None, typer.Option(help="Pages that this model read.", rich_help_panel=_PAGES)
]
_EngineWas = Annotated[
    str | None, typer.Option(help="Pages that this engine read.", rich_help_panel=_PAGES)
]
_VersionWas = Annotated[
    str | None,
    typer.Option(help="Pages that this version of the parser read.", rich_help_panel=_PAGES),
]
_DpiWas = Annotated[
    int | None,
    typer.Option(
        min=1, help="Pages that were rendered at this resolution.", rich_help_panel=_PAGES
    ),
]
_Pages = Annotated[
    str | None,
    typer.Option(metavar="3,7-9", help="Pages with these numbers.", rich_help_panel=_PAGES),
]
_AllPages = Annotated[bool, typer.Option("--all-pages", help="Read all good pages again.")]
_Wait = Annotated[
    bool | None,
    typer.Option(
        "--wait/--no-wait",
        help="Wait until every document is finished; with --no-wait not even until all runs of a "
        "large selection are added.",
    ),
]
_DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")
]


def reprocess(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID", help="Document IDs, or their unique first digits."),
    ] = None,
    failed: _Failed = False,
    error: _Error = None,
    collection: _Collection = None,
    since: _Since = None,
    before: _Before = None,
    parser_was: _ParserWas = None,
    truncated: _Truncated = False,
    model_was: _ModelWas = None,
    engine_was: _EngineWas = None,
    version_was: _VersionWas = None,
    dpi_was: _DpiWas = None,
    pages: _Pages = None,
    all_pages: _AllPages = False,
    parser: Parser = None,
    ocr: Ocr = None,
    password_file: PasswordFile = None,
    dry_run: _DryRun = False,
    wait: _Wait = None,
    as_json: Json = False,
) -> None:
    """Process documents again. Good pages are kept; the old text stays until the new is stored."""
    of_pages = {
        "truncated": truncated, "model_was": model_was, "engine_was": engine_was,
        "version_was": version_was, "dpi_was": dpi_was,
    }  # fmt: skip
    selectors = of_pages | {
        "ids": ids or [], "failed": failed, "error": error, "collection": collection,
        "since": since, "before": before, "parser_was": parser_was,
    }  # fmt: skip
    changes = {"parser": parser, "ocr": ocr, "all_pages": all_pages, "pages": pages}
    if password_file:
        _check_password_options(ids, choose_pages=bool(pages or any(of_pages.values())))
    _send(selectors, changes, password_file, dry_run=dry_run, wait=wait, as_json=as_json)


def _check_password_options(ids: list[str] | None, *, choose_pages: bool) -> None:
    option = "--password-file"
    if not ids:
        raise typer.BadParameter("name the document IDs.", param_hint=option)
    if choose_pages:
        raise typer.BadParameter(
            "an encrypted document has no pages to choose from.", param_hint=option
        )


def _send(
    selectors: dict[str, Any],
    changes: dict[str, Any],
    password_file: Path | None,
    *,
    dry_run: bool,
    wait: bool | None,
    as_json: bool,
) -> None:
    from rag_service.cli.passwords import read_password
    from rag_service.client import Client

    settings = begin()
    with Client(settings) as client:
        if selectors["ids"] and not dry_run:
            redone = _redo_named(client, selectors, changes, read_password(password_file))
        else:
            redone = client.redo_many(selectors | changes | {"dry_run": dry_run})
        if redone.documents or not redone.jobs:
            _report(redone, as_json=as_json)
        succeeded = follow_jobs(client, redone.jobs, wait=wait, as_json=as_json)
        if wait and redone.documents:
            succeeded &= _await(client, redone.documents, as_json=as_json)
    if not succeeded:
        raise typer.Exit(1)


def _redo_named(
    client: Client, selectors: dict[str, Any], changes: dict[str, Any], password: str | None
) -> Redone:
    """Redo with the password, or ask for one for each document that needs it."""
    from rag_service.cli.passwords import ask_and_redo, can_ask, locked
    from rag_service.client import Redone

    if password is None and not can_ask():
        return client.redo_many(selectors | changes)
    # A dry run checks the IDs and applies the other selectors; then each document is redone.
    selected = client.redo_many(selectors | changes | {"dry_run": True})
    ids = [redo.id for redo in selected.documents]
    if password is not None:
        return Redone([client.redo(one, changes | {"password": password}) for one in ids])
    would_queue = [redo.id for redo in selected.documents if redo.action == "would_queue"]
    encrypted = {view.id: view for view in locked(client.document(one) for one in would_queue)}
    asked = [ask_and_redo(client, view, changes) for view in encrypted.values()]
    rest = [one for one in ids if one not in encrypted]
    redone = client.redo_many(selectors | changes | {"ids": rest}) if rest else Redone()
    documents = redone.documents + [redo for redo in asked if redo is not None]
    return replace(redone, documents=documents)


def _report(redone: Redone, *, as_json: bool) -> None:
    if as_json:
        for redo in redone.documents:
            print_json(redo)
        return
    print_table(_COLUMNS, [_row(redo) for redo in redone.documents])
    counts = Counter(redo.action for redo in redone.documents)
    listed = ", ".join(
        f"{n} {field_text.redo_action(action)}" for action, n in counts.most_common()
    )
    typer.echo(listed[:1].upper() + listed[1:] + "." if listed else "Nothing to redo.")
    if (more := redone.selected - len(redone.documents)) > 0:
        typer.echo(f"{more} more documents are selected.")


def _row(redo: Redo) -> tuple[object, ...]:
    return (
        redo.id,
        redo.filename,
        field_text.redo_action(redo.action),
        redo.pages_reused,
        redo.pages_redone,
    )


def _await(client: Client, redone: list[Redo], *, as_json: bool) -> bool:
    from rag_service.cli.progress import follow

    ids = [redo.id for redo in redone if redo.run_id is not None]
    views = list(follow(ids, client.document, interval=_INTERVAL).values())
    if as_json:
        for view in views:
            print_json(view)
    else:
        print_table(("id", "file", "status", "pages", "error"), [_outcome(v) for v in views])
    return all(field_text.succeeded(view) for view in views)


def _outcome(view: DocumentView) -> tuple[object, ...]:
    run = view.latest_run
    return (
        view.id,
        view.filename,
        field_text.state(view),
        field_text.pages(run.pages),
        field_text.error(run.error),
    )
