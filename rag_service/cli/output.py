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
    """Aligned columns; None is an empty cell. Nothing is printed where there are no rows.

    A line is never cut or folded, so that an id can be copied whole.
    """
    from rich.cells import cell_len, set_cell_size

    lines = [tuple(columns)]
    lines += [tuple("" if cell is None else _one_line(str(cell)) for cell in row) for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    for line in lines if len(lines) > 1 else ():
        padded = (set_cell_size(*sized) for sized in zip(line, widths, strict=True))
        print("  ".join(padded).rstrip(), file=sys.stderr if to_stderr else sys.stdout)


def _one_line(text: str) -> str:
    """Without line ends and whatever else a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


class NoteHandler(logging.Handler):
    """Log records as notes, so that they appear above the progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            note(self.format(record))
        except Exception:
            self.handleError(record)
