"""The command `settings`: every option as a Markdown table, which the README holds too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rag_service.config.loader import Option

_HEAD = "| Setting | Environment | Default | Meaning |\n|---|---|---|---|"


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("settings")(print_settings)


def print_settings() -> None:
    """Print every setting as a Markdown table."""
    typer.echo(settings_table())


def settings_table() -> str:
    """The table itself, a row an option."""
    from rag_service.config.loader import options

    return "\n".join([_HEAD, *(_row(option) for option in options())])


def _row(option: Option) -> str:
    meaning = option.description.replace("|", "\\|")
    if option.secret:
        meaning += f" Secret; `{option.env}_FILE` may name a file that holds it."
    return f"| `{option.key}` | `{option.env}` | {_default(option.default)} | {meaning} |"


def _default(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list):
        return f"`{', '.join(str(item) for item in value)}`"
    return f"`{value}`"
