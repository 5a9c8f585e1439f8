"""The table of documents that `status` prints. On a terminal it fits the width."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rag_service.cli import field_text
from rag_service.cli.output import format_lines, one_line, print_table, table_lines

if TYPE_CHECKING:
    from rag_service.knowledgebase.views import DocumentView

_COLUMNS = ("id", "file", "collection", "status", "pages", "waits", "error", "warnings", "added")
# Shown only if a document had jobs on a service that is paid by the second.
_COST = "cost"
_NARROW = ("id", "file", "status", "pages", "note")
# Digits of a shortened ID: with a million documents, one in 4,000 has the same first 8 as another.
_ID_DIGITS = 8
# Least characters of a shortened filename; the rest of a line is for the note.
_LEAST_FILE, _LEAST_NOTE = 12, 16

# A document ID and what the service has under it.
Found = tuple[str, "DocumentView | None"]


def print_documents(found: Sequence[Found], *, wide: bool) -> None:
    """Print a line for each document.

    Lines are never cut if `wide` or if stdout is not a terminal. On a terminal that is too narrow,
    IDs are cut to their first digits and filenames and notes to the space that is left.
    """
    columns, rows = _whole(found)
    width = shutil.get_terminal_size().columns
    lines = format_lines(table_lines(columns, rows), aligned=True)
    if not rows or wide or not sys.stdout.isatty() or max(map(_cells, lines)) <= width:
        print_table(columns, rows)
    else:
        print_table(_NARROW, _narrow(found, width))


def _whole(found: Sequence[Found]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    from rag_service.knowledgebase.document_markdown import cost_of

    rows = [_row(document_id, view) for document_id, view in found]
    costs = [cost_of(view.cost) if view else "" for _, view in found]
    if not any(costs):
        return _COLUMNS, rows
    return (*_COLUMNS, _COST), [(*row, cost) for row, cost in zip(rows, costs, strict=True)]


def _row(document_id: str, view: DocumentView | None) -> tuple[object, ...]:
    if view is None:
        return (document_id, None, None, "not found", *(None,) * 5)
    return (
        view.id, view.filename, view.collection, field_text.state(view),
        field_text.pages(view.latest_run.pages), field_text.waiting(view),
        field_text.error(view.latest_run.error), field_text.warning_counts(view.warnings),
        field_text.moment(view.created_at),
    )  # fmt: skip


def _narrow(found: Sequence[Found], width: int) -> list[tuple[str, ...]]:
    rows = [_narrow_row(document_id, view) for document_id, view in found]
    digits = _unique_digits([document_id for document_id, _ in found])
    fixed = [max(map(_cells, column)) for column in list(zip(_NARROW, *rows, strict=True))[2:4]]
    # Two spaces stand between columns.
    free = width - digits - sum(fixed) - 2 * (len(_NARROW) - 1)
    notes = max(_cells(row[4]) for row in rows)
    file = max(_LEAST_FILE, free - max(_LEAST_NOTE, min(notes, free // 2)))
    names = max(_cells(name) for name in (_NARROW[1], *(row[1] for row in rows)))
    note = max(_LEAST_NOTE, free - min(file, names))
    return [
        (row[0][:digits], _cut(row[1], file), row[2], row[3], _cut(row[4], note)) for row in rows
    ]


def _narrow_row(document_id: str, view: DocumentView | None) -> tuple[str, ...]:
    if view is None:
        return (document_id, "", "not found", "", "")
    error = view.latest_run.error
    notes = (
        field_text.waiting(view), error.code if error else "",
        field_text.warning_counts(view.warnings),
    )  # fmt: skip
    return (
        view.id, one_line(view.filename), field_text.short_state(view),
        field_text.pages(view.latest_run.pages), "; ".join(filter(None, notes)),
    )  # fmt: skip


def _unique_digits(ids: Sequence[str]) -> int:
    """Return how many first digits tell the listed IDs apart, at least 8."""
    whole = max(map(len, ids), default=0)
    fitting = (n for n in range(_ID_DIGITS, whole) if len({i[:n] for i in ids}) == len(set(ids)))
    return next(fitting, whole)


def _cells(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def _cut(text: str, cells: int) -> str:
    """Return the text in at most this many cells of a terminal, with `…` if it was cut."""
    from rich.cells import set_cell_size

    if _cells(text) <= cells:
        return text
    return set_cell_size(text, cells - 1).rstrip() + "…"
