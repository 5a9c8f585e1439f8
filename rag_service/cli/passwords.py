"""Passwords of encrypted PDFs: read from a file or a prompt, never from an argument."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rag_service.cli.output import note
from rag_service.errors import ConfigurationError, EncryptedPdf, WrongPassword

if TYPE_CHECKING:
    from rag_service.client import Client
    from rag_service.knowledgebase.views import DocumentView, Redo

_TRIES = 3


def read_password(path: Path | None) -> str | None:
    """Return the first line of a password file, or None without one. Raises ConfigurationError."""
    if path is None:
        return None
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--password-file: {path} cannot be read: {error}") from error
    if not lines or not lines[0]:
        raise ConfigurationError(f"--password-file: {path} has no password on its first line.")
    return lines[0]


def locked(views: Iterable[DocumentView]) -> list[DocumentView]:
    """Return the documents whose newest run failed because it had no password."""
    return [
        view
        for view in views
        if view.latest_run.error and view.latest_run.error.code == EncryptedPdf.code
    ]


def can_ask() -> bool:
    """Return whether stdin and stderr are a terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask_and_redo(client: Client, view: DocumentView, changes: dict[str, Any]) -> Redo | None:
    """Ask for the password and redo the document; return None if none is given."""
    for _ in range(_TRIES):
        password = typer.prompt(
            f"Password of {view.filename} (empty: skip it)",
            hide_input=True, default="", show_default=False, err=True,
        )  # fmt: skip
        if not password:
            return None
        try:
            return client.redo(view.id, changes | {"password": password})
        except WrongPassword as error:
            note(error.message)
    return None
