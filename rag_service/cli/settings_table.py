"""The command `settings`: every option by area, in Markdown. docs/settings.md is its output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rag_service.config.option_list import Option

_HEAD = "| Setting | Environment | Default | Meaning |\n|---|---|---|---|"
_INTRODUCTION = """\
# Settings

Every default is in `config.yaml`. Your own file, named by `RAG_SERVICE_CONFIG` or `--config`, is
merged over it, and the environment wins over both. An empty variable counts as unset. Secrets come
from the environment or from a file named by `NAME_FILE`, never from a config file.

A plain number is a number of seconds, bytes or MiB, as the meaning says. Times may have a unit
(`500ms`, `30s`, `5min`, `2h`, `1d`, `1h30m`), and so may sizes (`500MB`, `1GB`, `2GiB`).

`make settings` writes this page. The options under "expert" rarely need a change."""


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("settings")(print_settings)


def print_settings() -> None:
    """Print every setting by area as Markdown tables."""
    typer.echo(settings_page())


def settings_page() -> str:
    """Return the whole page: for each area the common options, then the expert ones."""
    from rag_service.config.option_list import options

    parts = [_INTRODUCTION]
    for area in dict.fromkeys(option.area for option in options()):
        of_area = [option for option in options() if option.area == area]
        for heading, expert in ((f"## {area}", False), (f"### {area}: expert", True)):
            chosen = [option for option in of_area if option.expert is expert]
            # An area without common options still needs its heading.
            if chosen or not expert:
                parts.append(heading)
            if chosen:
                parts.append(_table(chosen))
    return "\n\n".join(parts)


def _table(chosen: Iterable[Option]) -> str:
    from rag_service.config.loader import packaged_defaults, value_at

    defaults = packaged_defaults()
    return "\n".join([_HEAD, *(_row(option, value_at(defaults, option.path)) for option in chosen)])


def _row(option: Option, default: Any) -> str:
    meaning = option.description.replace("|", "\\|")
    if option.secret:
        meaning += " Secret."
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
