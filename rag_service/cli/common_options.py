"""Options that several commands share, and how a command begins."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rag_service.cli.output import NoteHandler
from rag_service.states import OcrMode

if TYPE_CHECKING:
    from rag_service.config.options import Settings

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
Collection = Annotated[str | None, typer.Option(help="The collection of the documents.")]
Parser = Annotated[str | None, typer.Option(help="The parser that reads the pages.")]
Ocr = Annotated[
    OcrMode | None,
    typer.Option(help="Pages for the OCR server: those that need it (auto), all, or none."),
]
PasswordFile = Annotated[
    Path | None,
    typer.Option(
        exists=True, dir_okay=False, help="A file that holds the password of encrypted PDFs."
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until every document has ended.")]
Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Documents by their id.")]


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


def begin_process() -> Settings:
    """Load the settings for a process that stays, and log as they say.

    Raises ConfigurationError.
    """
    from rag_service.config.loader import get_settings, warn_of_unknown_variables
    from rag_service.runtime.log_format import configure_logging

    settings = get_settings()
    # Before our own logging, so that no log level hides it: Python then writes it as it is.
    warn_of_unknown_variables(os.environ)
    configure_logging(settings)
    return settings
