"""The command `rag-service`: its global options, its commands, its exit status.

Exit status: 0 success, 1 something failed, 2 wrong usage or configuration, 3 a service cannot
be reached, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from rag_service import __version__
from rag_service.cli import (
    cancel_and_delete,
    ingest,
    probe,
    process_commands,
    reprocess_command,
    reprocess_jobs_command,
    run,
    settings_table,
    show,
    status,
    up,
)
from rag_service.cli.command_help import PlainCommand, PlainGroup
from rag_service.cli.output import note
from rag_service.errors import (
    OUTAGES,
    ConfigurationError,
    Forbidden,
    InvalidOptions,
    RagServiceError,
    Unauthorized,
)

FAILED, WRONG_USAGE, UNREACHABLE = 1, 2, 3

app = typer.Typer(
    name="rag-service",
    cls=PlainGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Turn PDFs and scans into a searchable knowledgebase with page citations.",
)

for commands in (
    run,
    up,
    ingest,
    status,
    show,
    cancel_and_delete,
    reprocess_command,
    reprocess_jobs_command,
    process_commands,
    probe,
    settings_table,
):
    commands.register(app)
for registered in app.registered_commands:
    registered.cls = PlainCommand


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rag-service {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    config: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="A YAML file of settings that override the defaults."
        ),
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Log at level DEBUG; show the traceback of an error.")
    ] = False,
    version: Annotated[  # noqa: ARG001
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    # In the environment, so that child processes get both.
    if config is not None:
        os.environ["RAG_SERVICE_CONFIG"] = str(config.resolve())
    if debug:
        os.environ["RAG_SERVICE_LOG_LEVEL"] = "DEBUG"


def exit_status(error: Exception) -> int:
    """Return the exit status for an error that ended a command."""
    if isinstance(error, ConfigurationError | InvalidOptions | Unauthorized | Forbidden):
        return WRONG_USAGE
    if isinstance(error, OUTAGES):
        return UNREACHABLE
    return FAILED


def main() -> NoReturn:
    """Run the command line. Every error ends as a sentence on stderr and an exit status."""
    _open_closed_streams()
    status: int | str | None = 0
    try:
        app()
    except BrokenPipeError:
        # The reader of stdout has closed it, as `head` does.
        status = FAILED
    except SystemExit as end:
        status = end.code
    except RagServiceError as error:
        status = _report(error, error.message)
    except Exception as error:
        outage = _database_outage(error)
        sentence = outage.message if outage else f"{type(error).__name__}: {error}"
        status = _report(outage or error, sentence)
    _exit(status)


def _database_outage(error: Exception) -> RagServiceError | None:
    """Return an outage of PostgreSQL that no command handled, as one of our errors."""
    from rag_service.database.engine import DatabaseError, as_unavailable

    outage = as_unavailable(error) if isinstance(error, DatabaseError) else None
    if outage is not None:
        outage.__cause__ = error
    return outage


def _report(error: Exception, sentence: str) -> int:
    if os.environ.get("RAG_SERVICE_LOG_LEVEL") == "DEBUG":
        traceback.print_exception(error)
    elif not isinstance(error, RagServiceError):
        sentence += "\nThis is a bug; `rag-service --debug …` shows the traceback."
    note(f"rag-service: {sentence}")
    return exit_status(error)


def _open_closed_streams() -> None:
    """Open /dev/null for each closed standard stream.

    Otherwise the next socket would get its number, and output would be written into it.
    """
    for number, (name, mode) in enumerate([("stdin", "r"), ("stdout", "w"), ("stderr", "w")]):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _exit(status: int | str | None) -> NoReturn:
    """Exit; without an error message if the reader of stdout has closed it."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            note(f"rag-service: Cannot write to standard output: {error.strerror}.")
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = status or FAILED
    sys.exit(status)


if __name__ == "__main__":
    main()
