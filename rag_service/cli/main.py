"""The command `rag-service`: its global options, its commands, and what errors become.

Exit status: 0 all well, 1 something failed, 2 wrong usage or configuration, 3 a service cannot
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

from rag_service.cli import (
    document_commands,
    ingest,
    probe,
    process_commands,
    reprocess_command,
    run,
    settings_table,
    up,
)
from rag_service.cli.output import note
from rag_service.errors import (
    ConfigurationError,
    InvalidOptions,
    RagServiceError,
    ServiceUnreachable,
    StorageUnavailable,
    Unauthorized,
)

FAILED, WRONG_USAGE, UNREACHABLE = 1, 2, 3

app = typer.Typer(
    name="rag-service",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Turns PDFs and scans into a searchable knowledgebase with page citations.",
)

for commands in (
    run,
    up,
    ingest,
    document_commands,
    reprocess_command,
    process_commands,
    probe,
    settings_table,
):
    commands.register(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"rag-service {version('rag_service')}")
        raise typer.Exit


@app.callback()
def _global_options(
    config: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="A file of settings, merged over the defaults."
        ),
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Log everything; show the traceback of any error.")
    ] = False,
    version: Annotated[  # noqa: ARG001
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    # The environment carries both to the processes that this one starts.
    if config is not None:
        os.environ["RAG_SERVICE_CONFIG"] = str(config.resolve())
    if debug:
        os.environ["RAG_SERVICE_LOG_LEVEL"] = "DEBUG"


def exit_status(error: Exception) -> int:
    """What a command that ended with this error exits with."""
    if isinstance(error, ConfigurationError | InvalidOptions | Unauthorized):
        return WRONG_USAGE
    if isinstance(error, ServiceUnreachable | StorageUnavailable):
        return UNREACHABLE
    return FAILED


def main() -> NoReturn:
    """Run the command line; every error becomes a sentence on stderr and an exit status."""
    status: int | str | None = 0
    try:
        app()
    except SystemExit as end:
        status = end.code
    except RagServiceError as error:
        status = _tell(error, error.message)
    except Exception as error:
        status = _tell(error, f"{type(error).__name__}: {error}")
    _leave(status)


def _tell(error: Exception, sentence: str) -> int:
    if os.environ.get("RAG_SERVICE_LOG_LEVEL") == "DEBUG":
        traceback.print_exception(error)
    elif not isinstance(error, RagServiceError):
        sentence += "\nThis was not expected; `rag-service --debug …` shows where it happened."
    note(f"rag-service: {sentence}")
    return exit_status(error)


def _leave(status: int | str | None) -> NoReturn:
    """Exit without a complaint where nobody reads our output any more."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = status or FAILED
    sys.exit(status)


if __name__ == "__main__":
    main()
