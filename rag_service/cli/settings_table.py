"""The command `settings`: every option as a Markdown table, which the README holds too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rag_service.config.option_list import Option

_HEAD = "| Setting | Environment | Default | Meaning |\n|---|---|---|---|"


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("settings")(print_settings)


def print_settings() -> None:
    """Print every setting as a Markdown table."""
    typer.echo(settings_table())


def settings_table() -> str:
    """The table itself, a row an option."""
    from rag_service.config.loader import packaged_defaults, value_at
    from rag_service.config.option_list import options

    defaults = packaged_defaults()
    rows = (_row(option, value_at(defaults, option.path)) for option in options())
    return "\n".join([_HEAD, *rows])


def _row(option: Option, default: Any) -> str:
    meaning = option.description.replace("|", "\\|")
    if option.secret:
        meaning += f" Secret: `{option.env}_FILE` may name a file that contains it."
    if option.old_key:
        meaning += f" Formerly `{option.old_key}`."
    return f"| `{option.key}` | `{option.env}` | {_default(default)} | {meaning} |"


def _default(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list):
        return f"`{', '.join(str(item) for item in value)}`"
    return f"`{value}`"
