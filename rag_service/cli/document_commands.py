"""The commands that look at documents or end them: status, show, cancel, delete."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from rag_service.cli import document_formats, status_text
from rag_service.cli.common_options import Collection, Ids, Json, begin
from rag_service.cli.document_formats import Format
from rag_service.cli.output import note, one_line, print_json, print_table
from rag_service.errors import NotFound
from rag_service.runtime.plural import counted
from rag_service.states import RunState

if TYPE_CHECKING:
    from rag_service.client import Client
    from rag_service.knowledgebase.views import DocumentView, JobView

_COLUMNS = ("id", "file", "collection", "status", "pages", "waits", "error", "warnings", "added")
# Only where a document had jobs that are paid by the second.
_COST = "cost"
_JOB_COLUMNS = (
    "job", "pages", "reason", "state", "status", "outcome", "submitted", "age", "polls",
    "delay ms", "execution ms", "usd at least", "error",
)  # fmt: skip
_LISTED = 50
_GONE = "not found"


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(status)
    app.command()(show)
    app.command()(cancel)
    app.command()(delete)


def status(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]...", help="Documents by their id; none: the newest."),
    ] = None,
    wanted: Annotated[
        RunState | None, typer.Option("--status", help="Only documents in this state.")
    ] = None,
    collection: Collection = None,
    error: Annotated[
        str | None, typer.Option(help="Only documents whose newest run has this error code.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most documents listed.")] = _LISTED,
    as_json: Json = False,
) -> None:
    """Show how documents stand, the newest first."""
    from rag_service.knowledgebase.document_markdown import cost_of

    with _client() as client:
        if ids:
            found = [(one, _look_up(client, one)) for one in dict.fromkeys(ids)]
        else:
            filters = {"status": wanted, "collection": collection, "error": error}
            given = {name: str(value) for name, value in filters.items() if value is not None}
            found = [(view.id, view) for view in client.documents(given, limit)]
        servers = [] if ids or as_json else client.servers()
    views = [view for _, view in found if view]
    if as_json:
        for view in views:
            print_json(view)
    else:
        rows = [_row(one, view) for one, view in found]
        costs = [cost_of(view.cost) if view else "" for _, view in found]
        if any(costs):
            rows = [(*row, cost) for row, cost in zip(rows, costs, strict=True)]
        print_table((*_COLUMNS, _COST) if any(costs) else _COLUMNS, rows)
        cut = f" (the newest {limit}; --limit shows more)" if len(found) == limit else ""
        typer.echo(status_text.status_counts(views) + ("" if ids else cut))
        for server in servers:
            typer.echo(one_line(status_text.server(server)))
    if len(views) < len(found):
        raise typer.Exit(1)


def _client() -> Client:
    from rag_service.client import Client

    return Client(begin())


def _look_up(client: Client, document_id: str) -> DocumentView | None:
    try:
        return client.document(document_id)
    except NotFound:
        typer.echo(f"rag-service: there is no document {document_id}.", err=True)
        return None


def _row(document_id: str, view: DocumentView | None) -> tuple[object, ...]:
    if view is None:
        return (document_id, None, None, _GONE, *(None,) * 5)
    return (
        view.id, view.filename, view.collection, status_text.state(view),
        status_text.pages(view.latest_run.pages), status_text.waiting(view),
        status_text.error(view.latest_run.error), status_text.warning_counts(view.warnings),
        status_text.moment(view.created_at),
    )  # fmt: skip


def show(
    document_id: Annotated[str, typer.Argument(metavar="ID", help="The document's id.")],
    page: Annotated[int | None, typer.Option(min=1, help="This page alone.")] = None,
    jobs: Annotated[
        bool, typer.Option("--jobs", help="Its jobs on RunPod, in place of its text.")
    ] = False,
    form: Annotated[Format, typer.Option("--format", help="How it is printed.")] = Format.MD,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Print a document's text, page by page, or what was posted to RunPod for it."""
    if jobs and page is not None:
        raise typer.BadParameter("a job has several pages: leave --page out.", param_hint="--jobs")
    form = Format.JSON if as_json else form
    with _client() as client:
        if jobs:
            _print_jobs(client.jobs(document_id), as_json=form is Format.JSON)
            return
        if page is not None:
            sys.stdout.write(document_formats.page(client.page(document_id, page), form))
            return
        view = client.document(document_id)
        sys.stdout.writelines(document_formats.document(view, client.pages(document_id), form))


def _print_jobs(jobs: list[JobView], *, as_json: bool) -> None:
    if as_json:
        for job in jobs:
            print_json(job)
    elif jobs:
        print_table(_JOB_COLUMNS, map(_job_row, jobs))
    else:
        note("No page of this document was posted to RunPod.")


def _job_row(job: JobView) -> tuple[object, ...]:
    return (
        job.remote_id, status_text.page_ranges(job.pages), job.reason, job.state, job.last_status,
        job.outcome, status_text.moment(job.submitted_at), status_text.duration(job.age_seconds),
        job.polls, job.delay_ms, job.execution_ms,
        None if job.usd is None else f"{job.usd:.4f}", job.error,
    )  # fmt: skip


def cancel(ids: Ids, as_json: Json = False) -> None:
    """End what is at work on documents; finished pages stay."""
    with _client() as client:

        def end(document_id: str) -> str:
            return "cancelled" if client.cancel(document_id) else "nothing was at work"

        _for_each(ids, end, as_json=as_json)


def delete(
    ids: Ids,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove documents with their pages and files."""
    if not yes:
        _require_consent(len(ids))
    with _client() as client:

        def remove(document_id: str) -> str:
            client.delete(document_id)
            return "deleted"

        _for_each(ids, remove, as_json=as_json)


def _require_consent(count: int) -> None:
    if not sys.stdin.isatty():
        raise typer.BadParameter("say --yes where nobody can be asked.", param_hint="delete")
    typer.confirm(f"Delete {counted(count, 'document')}?", abort=True, err=True)


def _for_each(ids: list[str], act: Callable[[str], str], *, as_json: bool) -> None:
    """Do it to each; one that is not there does not stop the others, but counts as failed."""
    fates = {document_id: _fate(act, document_id) for document_id in dict.fromkeys(ids)}
    if as_json:
        for document_id, fate in fates.items():
            print_json({"id": document_id, "result": fate})
    else:
        print_table(("id", "result"), fates.items())
    if _GONE in fates.values():
        raise typer.Exit(1)


def _fate(act: Callable[[str], str], document_id: str) -> str:
    try:
        return act(document_id)
    except NotFound:
        return _GONE
