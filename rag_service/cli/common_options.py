"""Options that several commands share, and the setup of a command."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rag_service.cli.output import NoteHandler
from rag_service.states import OcrMode

if TYPE_CHECKING:
    from rag_service.client import Client
    from rag_service.config.options import Settings

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
Collection = Annotated[str | None, typer.Option(help="The collection of the documents.")]
Parser = Annotated[str | None, typer.Option(help="The parser to read the pages with.")]
Ocr = Annotated[
    OcrMode | None,
    typer.Option(
        help="Pages to send to the OCR server: those that need it (auto), all (force), none (off)."
    ),
]
PasswordFile = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="A file whose first line is the password of encrypted PDFs.",
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until every document is finished.")]
Ids = Annotated[
    list[str], typer.Argument(metavar="ID", help="Document IDs, or their unique first digits.")
]


def complete_code(incomplete: str) -> list[str]:
    """Return the error codes that begin like this, for the completion of a shell."""
    from rag_service.errors import outcome_codes

    return sorted(code for code in outcome_codes() if code.startswith(incomplete))


def begin() -> Settings:
    """Load the settings for a command; warnings go to stderr, above its progress bars.

    Raises ConfigurationError.
    """
    from rag_service.config.loader import get_settings, warn_of_unknown_variables

    handler = NoteHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    settings = get_settings()
    if settings.log_level == "DEBUG":
        logging.getLogger().setLevel(logging.DEBUG)
    warn_of_unknown_variables(os.environ)
    return settings


def open_client() -> Client:
    """Load the settings and return a client for the service. Raises ConfigurationError."""
    from rag_service.client import Client

    return Client(begin())


def begin_process() -> Settings:
    """Load the settings for a long-running process, set up its log, check the system's limits.

    Raises ConfigurationError.
    """
    from rag_service.config.loader import get_settings, warn_of_unknown_variables
    from rag_service.runtime.log_format import configure_logging
    from rag_service.runtime.start_limits import require_start_limits

    settings = get_settings()
    # Before the log is set up, so that no log level hides it: Python writes it to stderr.
    warn_of_unknown_variables(os.environ)
    configure_logging(settings)
    require_start_limits()
    return settings
