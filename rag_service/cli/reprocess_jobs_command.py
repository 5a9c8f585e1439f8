"""The command `reprocess-jobs`: lists, follows and cancels the jobs of a large reprocess."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from rag_service.cli import field_text
from rag_service.cli.common_options import Json, open_client
from rag_service.cli.output import note, print_json, print_lines, print_table, stderr
from rag_service.errors import InvalidOptions
from rag_service.states import ReprocessState

if TYPE_CHECKING:
    from rag_service.client import Client
    from rag_service.knowledgebase.views import ReprocessJobView

_INTERVAL = 1.0
_LINE_SECONDS = 5.0
_INTERRUPTED = 130
_COLUMNS = ("id", "state", "added", "documents", "runs in progress", "runs failed", "message")


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(reprocess_jobs)


def reprocess_jobs(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ID", help="Job IDs, or their unique first digits. Default: the newest jobs."
        ),
    ] = None,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Add no more runs; those that were added go on.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until every document of the jobs is finished.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show, follow or cancel the jobs that reprocess many documents."""
    if (cancel or wait) and not ids:
        raise InvalidOptions("--cancel and --wait need the IDs of jobs.")
    with open_client() as client:
        for job_id in ids or () if cancel else ():
            client.cancel_reprocess_job(job_id)
        chosen = [client.reprocess_job(one) for one in ids or ()]
        jobs = chosen if ids else client.reprocess_jobs()
        if not wait:
            _print(jobs, as_json=as_json)
        elif not follow_jobs(client, jobs, wait=True, as_json=as_json):
            raise typer.Exit(1)


def _print(jobs: Sequence[ReprocessJobView], *, as_json: bool) -> None:
    if as_json:
        for job in jobs:
            print_json(job)
        return
    print_table(_COLUMNS, [_row(job) for job in jobs])
    if not jobs:
        typer.echo("No reprocess job.")


def _row(job: ReprocessJobView) -> tuple[object, ...]:
    return (
        job.id,
        job.state,
        field_text.moment(job.created_at),
        f"{job.handled}/{job.total}",
        job.runs_active,
        job.runs_failed,
        job.message,
    )


def follow_jobs(
    client: Client, jobs: Sequence[ReprocessJobView], *, wait: bool | None, as_json: bool
) -> bool:
    """Follow each job until its runs are added, with `wait` until they have ended.

    Print it then. If `wait` is False, print it at once. Return False if a run failed. An
    interrupt leaves the jobs as they are.
    """
    try:
        ended = [
            _follow(client, job, to_the_end=wait) if wait is not False else job for job in jobs
        ]
    except KeyboardInterrupt:
        for job in jobs:
            note(f"The job goes on. {_ways(job)}")
        raise typer.Exit(_INTERRUPTED) from None
    for job in ended:
        if as_json:
            print_json(job)
        else:
            print_lines(field_text.reprocess_job(job))
            if job.state is ReprocessState.RUNNING:
                print_lines(_ways(job))
    return not (wait and any(job.runs_failed for job in ended))


def _ways(job: ReprocessJobView) -> str:
    command = f"rag-service reprocess-jobs {job.id}"
    return f"Follow it: {command} --wait. Stop it: {command} --cancel."


def _follow(client: Client, job: ReprocessJobView, *, to_the_end: bool | None) -> ReprocessJobView:
    with _Progress(job) as progress:
        while job.state is ReprocessState.RUNNING or (to_the_end and job.runs_active):
            time.sleep(_INTERVAL)
            job = client.reprocess_job(job.id)
            progress.show(job)
    return job


class _Progress:
    """A bar of the job's documents on a terminal, else a line every few seconds."""

    def __init__(self, job: ReprocessJobView) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}", markup=False),
            console=stderr(),
            redirect_stdout=False,
            disable=not stderr().is_terminal,
        )
        self._task = self._bar.add_task("documents", total=job.total, state="")
        self._said_at = float("-inf")

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, job: ReprocessJobView) -> None:
        """Show the newest state of the job."""
        state = job.message or f"{job.runs_active} runs in progress"
        self._bar.update(self._task, completed=job.handled, state=state)
        now = time.monotonic()
        if self._bar.disable and now - self._said_at >= _LINE_SECONDS:
            self._said_at = now
            note(field_text.reprocess_job(job))
