"""The command `show`: a document's text, or its jobs on RunPod."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from rag_service.cli import document_formats, field_text
from rag_service.cli.common_options import open_client
from rag_service.cli.document_formats import Format
from rag_service.cli.output import note, print_json, print_table

if TYPE_CHECKING:
    from rag_service.knowledgebase.views import JobView

_JOB_COLUMNS = (
    "job", "pages", "reason", "state", "status", "outcome", "submitted", "age", "polls",
    "delay ms", "execution ms", "usd at least", "error",
)  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(show)


def show(
    document_id: Annotated[
        str, typer.Argument(metavar="ID", help="The document ID, or its unique first digits.")
    ],
    page: Annotated[int | None, typer.Option(min=1, help="Print only this page.")] = None,
    jobs: Annotated[
        bool, typer.Option("--jobs", help="Print the document's jobs on RunPod, not its text.")
    ] = False,
    form: Annotated[Format, typer.Option("--format", help="The output format.")] = Format.MD,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Print a document's text page by page, or its jobs on RunPod."""
    if jobs and page is not None:
        raise typer.BadParameter("a job has several pages: omit --page.", param_hint="--jobs")
    form = Format.JSON if as_json else form
    with open_client() as client:
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
        job.remote_id, field_text.page_ranges(job.pages), job.reason, job.state, job.last_status,
        job.outcome, field_text.moment(job.submitted_at), field_text.duration(job.age_seconds),
        job.polls, job.delay_ms, job.execution_ms,
        None if job.usd is None else f"{job.usd:.4f}", job.error,
    )  # fmt: skip
