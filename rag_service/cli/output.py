"""What commands write: results to stdout, everything else to stderr. Used by every command."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console
    from rich.table import Table

# Without a terminal nothing is cut to its width.
_UNBOUNDED = 10_000


@cache
def stderr() -> Console:
    """The console for people; progress bars and notes share it, so that neither breaks."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """A line on stderr, as it is."""
    try:
        stderr().print(text, markup=False)
    except BrokenPipeError:
        return


def print_json(value: BaseModel | Mapping[str, Any]) -> None:
    """One object on a line of stdout."""
    if isinstance(value, Mapping):
        print(json.dumps(value, ensure_ascii=False, default=str), flush=True)
    else:
        print(value.model_dump_json(), flush=True)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, to_stderr: bool = False
) -> None:
    """Aligned columns; None is an empty cell. Nothing is printed where there are no rows."""
    from rich.console import Console

    file = sys.stderr if to_stderr else sys.stdout
    table = _table(columns, rows)
    if table.row_count:
        width = None if file.isatty() else _UNBOUNDED
        Console(file=file, highlight=False, width=width).print(table)


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column == "id", overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    return table


class NoteHandler(logging.Handler):
    """Log records as notes, so that they appear above the progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            note(self.format(record))
        except Exception:
            self.handleError(record)
