"""What commands write: results to stdout, everything else to stderr. Used by every command."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """Columns, aligned on a terminal, else parted by tabs; None is an empty cell.

    Nothing is printed where there are no rows. A line is never cut or folded, so that an id can
    be copied whole.
    """
    lines = [tuple(columns)]
    lines += [tuple("" if cell is None else one_line(str(cell)) for cell in row) for row in rows]
    stream = sys.stderr if to_stderr else sys.stdout
    for line in _laid_out(lines, aligned=stream.isatty()) if len(lines) > 1 else ():
        print(line, file=stream)


def _laid_out(lines: list[tuple[str, ...]], *, aligned: bool) -> Iterator[str]:
    if not aligned:
        yield from ("\t".join(line) for line in lines)
        return
    from rich.cells import cell_len, set_cell_size

    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = (set_cell_size(*sized) for sized in zip(line, widths, strict=True))
        yield "  ".join(padded).rstrip()


def write_out(pieces: Iterable[str]) -> bool:
    """Write to stdout; False, from then on for good, where nobody reads it any more."""
    try:
        sys.stdout.writelines(pieces)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still in hand goes nowhere at the end, without a complaint.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def one_line(text: str) -> str:
    """Without line ends and whatever else a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


class NoteHandler(logging.Handler):
    """Log records as notes, so that they appear above the progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            note(self.format(record))
        except Exception:
            self.handleError(record)
