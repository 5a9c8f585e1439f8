"""The output of commands: results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console


@cache
def stderr() -> Console:
    """Return the console on stderr, which notes and progress bars share."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """Print a line on stderr, without markup."""
    try:
        stderr().print(text, markup=False)
    except BrokenPipeError:
        return


def print_json(value: BaseModel | Mapping[str, Any]) -> None:
    """Print one object on one line of stdout."""
    if isinstance(value, Mapping):
        print(json.dumps(value, ensure_ascii=False, default=str), flush=True)
    else:
        print(value.model_dump_json(), flush=True)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, to_stderr: bool = False
) -> None:
    """Print columns, aligned on a terminal, else separated by tabs; None is an empty cell.

    Prints nothing if there are no rows. A line is never cut or wrapped, so that an ID can be
    copied whole.
    """
    lines = table_lines(columns, rows)
    stream = sys.stderr if to_stderr else sys.stdout
    for line in format_lines(lines, aligned=stream.isatty()) if len(lines) > 1 else ():
        print(line, file=stream)


def table_lines(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[tuple[str, ...]]:
    """Return the head and the rows as cells of one line each; None is an empty cell."""
    cells = [tuple("" if cell is None else one_line(str(cell)) for cell in row) for row in rows]
    return [tuple(columns), *cells]


def format_lines(lines: list[tuple[str, ...]], *, aligned: bool) -> Iterator[str]:
    """Yield each line's text: cells padded to their columns, or separated by tabs."""
    if not aligned:
        yield from ("\t".join(line) for line in lines)
        return
    from rich.cells import cell_len, set_cell_size

    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = (set_cell_size(*sized) for sized in zip(line, widths, strict=True))
        yield "  ".join(padded).rstrip()


def print_lines(text: str) -> None:
    """Print a sentence on stdout; on a terminal, wrapped at words to its width."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    print(textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False))


def write_out(pieces: Iterable[str]) -> bool:
    """Write to stdout. Return False if the reader has closed it; later output is discarded."""
    try:
        sys.stdout.writelines(pieces)
        sys.stdout.flush()
    except BrokenPipeError:
        # Otherwise Python reports what is still buffered as an error when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def one_line(text: str) -> str:
    """Return the text with line ends and control characters replaced by spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


class NoteHandler(logging.Handler):
    """Prints log records as notes, so that they appear above the progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            note(self.format(record))
        except Exception:
            self.handleError(record)
