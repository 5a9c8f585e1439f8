"""Converts boxes to text in reading order: columns, rows, paragraphs.

Uses rectangles only, no pixels. A gutter is a vertical white strip with prose on both sides; boxes
that cross it cut the page into bands; bands are read one after the other, columns left to right.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median

from workers.servers.cpu_ocr.ocr_engine import TextBox

MIN_CONFIDENCE = 0.5
# From this ratio of height to width, a box contains text that runs up or down.
TALL = 1.5
# A column of prose: the minimum of its rows, of their median letters, and of their median share
# of the column's width.
PROSE_ROWS = 3
PROSE_LETTERS = 12
PROSE_FILL = 0.55

_BROKEN_WORD = re.compile(r"(?:^|\s)[^\W\d_]{2,}-$")


@dataclass(frozen=True)
class TextRow:
    """Boxes side by side, left to right."""

    boxes: tuple[TextBox, ...]

    @cached_property
    def text(self) -> str:
        return " ".join(box.text for box in self.boxes)

    @cached_property
    def x0(self) -> float:
        return self.boxes[0].x0

    @cached_property
    def x1(self) -> float:
        return max(box.x1 for box in self.boxes)

    @cached_property
    def y(self) -> float:
        return median(box.y for box in self.boxes)

    @cached_property
    def height(self) -> float:
        return median(box.height for box in self.boxes)


def to_text(boxes: Iterable[TextBox]) -> str:
    """Return paragraphs separated by blank lines, with the page's line breaks inside them.

    Boxes below MIN_CONFIDENCE are dropped; text that runs up or down the page comes last.
    """
    kept = [box for box in boxes if box.confidence >= MIN_CONFIDENCE and box.text]
    upright = [box for box in kept if not is_tall(box)]
    sideways = sorted((box for box in kept if is_tall(box)), key=lambda box: (-box.x, box.y))
    paragraphs = [p for block in _blocks(upright) for p in _paragraphs(_rows(block))]
    return "\n\n".join([*paragraphs, *(box.text for box in sideways)])


def is_tall(box: TextBox) -> bool:
    """Return True if the box's text runs up or down; a single upright letter may be narrow."""
    return len(box.text) > 2 and box.height > TALL * box.width


def _blocks(boxes: Sequence[TextBox]) -> list[list[TextBox]]:
    """Split into parts in reading order, none of which has columns."""
    if not boxes:
        return []
    bands = _best_bands(boxes)
    if not any(band.columns for band in bands):
        return [list(boxes)]
    blocks = []
    for band in bands:
        for part in band.columns or (band.boxes,):
            blocks += _blocks(part)
    return blocks


@dataclass(frozen=True)
class Band:
    """A horizontal part of the page; `columns` is empty if it has none."""

    boxes: list[TextBox]
    columns: tuple[list[TextBox], ...] = ()


def _best_bands(boxes: Sequence[TextBox]) -> list[Band]:
    """Return the bands of the gutter that divides most text; one band if there is no gutter."""
    unit = max(1.0, median(box.height for box in boxes))
    edges = {round(box.x1 / unit): box.x1 + unit / 4 for box in boxes}
    best, best_letters = [Band(list(boxes))], 0
    for x in sorted(edges.values()):
        bands = _bands(boxes, x, unit)
        letters = sum(len(box.text) for band in bands if band.columns for box in band.boxes)
        if letters > best_letters:
            best, best_letters = bands, letters
    return best


def _bands(boxes: Sequence[TextBox], x: float, unit: float) -> list[Band]:
    """Cut at every box that crosses x; neighbours without columns are one band."""
    bands: list[Band] = []
    straight: list[TextBox] = []
    for run, crosses in _runs(boxes, x, unit):
        columns = () if crosses else _columns(run, x)
        if not columns:
            straight += run
            continue
        if straight:
            bands.append(Band(straight))
        run, straight = _without_heading(run, columns)
        bands.append(Band(run, _columns(run, x)))
    return [*bands, Band(straight)] if straight else bands


def _runs(boxes: Sequence[TextBox], x: float, unit: float) -> Iterable[tuple[list[TextBox], bool]]:
    """Yield from top to bottom the maximal runs of boxes that cross x, or that do not."""
    run: list[TextBox] = []
    crossing = False
    for box in sorted(boxes, key=lambda box: box.y):
        crosses = box.x0 < x - unit / 2 and box.x1 > x + unit / 2
        if run and crosses != crossing:
            yield run, crossing
            run = []
        crossing = crosses
        run.append(box)
    if run:
        yield run, crossing


def _columns(run: Sequence[TextBox], x: float) -> tuple[list[TextBox], ...]:
    left = [box for box in run if box.x < x]
    right = [box for box in run if box.x >= x]
    return (left, right) if _is_prose(left) and _is_prose(right) else ()


def _without_heading(
    run: list[TextBox], columns: Sequence[list[TextBox]]
) -> tuple[list[TextBox], list[TextBox]]:
    """Separate a single last row below both columns from the run: it is the next heading."""
    ends = sorted(columns, key=lambda column: max(box.y for box in column))
    floor = max(box.y1 for box in ends[0])
    *_, above, last = _rows(ends[1])
    apart = last.y - above.y > 2 * last.height
    if not apart or last.y < floor or above.y > floor:
        return run, []
    return [box for box in run if box not in last.boxes], list(last.boxes)


def _is_prose(boxes: Sequence[TextBox]) -> bool:
    """Return True if the rows fill their column, as prose does and a table's cells do not."""
    rows = _rows(boxes)
    if len(rows) < PROSE_ROWS:
        return False
    widths = sorted(row.x1 - row.x0 for row in rows)
    full = widths[len(widths) * 4 // 5]
    letters = median(len(row.text) for row in rows)
    return letters >= PROSE_LETTERS and median(widths) >= PROSE_FILL * full


def _rows(boxes: Sequence[TextBox]) -> list[TextRow]:
    """Group boxes that overlap by half their height into rows, from top to bottom."""
    rows: list[list[TextBox]] = []
    for box in sorted(boxes, key=lambda box: box.y):
        home = next((row for row in reversed(rows[-3:]) if _beside(row, box)), None)
        if home is None:
            rows.append([box])
        else:
            home.append(box)
    return [TextRow(tuple(sorted(row, key=lambda box: box.x0))) for row in rows]


def _beside(row: Sequence[TextBox], box: TextBox) -> bool:
    near = min(row, key=lambda other: abs(other.x - box.x))
    overlap = min(near.y1, box.y1) - max(near.y0, box.y0)
    apart = near.x1 - box.x0 < box.height or box.x1 - near.x0 < box.height
    return apart and overlap >= min(near.height, box.height) / 2


def _paragraphs(rows: Sequence[TextRow]) -> list[str]:
    if not rows:
        return []
    shape = _Shape(rows)
    paragraphs = [[rows[0].text]]
    for above, row in pairwise(rows):
        if shape.breaks(above, row):
            paragraphs.append([row.text])
        else:
            _append(paragraphs[-1], row.text)
    return ["\n".join(lines) for lines in paragraphs]


def _append(lines: list[str], text: str) -> None:
    """Add a line; a word hyphenated at the line end is joined."""
    if text[:1].islower() and _BROKEN_WORD.search(lines[-1]):
        rest, _, text = text.partition(" ")
        lines[-1] = lines[-1][:-1] + rest
    if text:
        lines.append(text)


class _Shape:
    """The usual line pitch and margins of a block, to detect paragraph breaks."""

    def __init__(self, rows: Sequence[TextRow]) -> None:
        steps = [below.y - above.y for above, below in pairwise(rows)]
        self.height = median(row.height for row in rows)
        self.pitch = min(median(steps), 2 * self.height) if steps else self.height
        self.left = median(row.x0 for row in rows)
        self.right = max(row.x1 for row in rows)

    def breaks(self, above: TextRow, row: TextRow) -> bool:
        """Return True if a paragraph ends between two rows, by space, size or indent."""
        larger, smaller = max(above.height, row.height), min(above.height, row.height)
        indented = row.x0 - max(self.left, above.x0) > self.height * 0.8
        ended = self.right - above.x1 > self.height * 2
        spaced = row.y - above.y > max(1.35 * self.pitch, 1.6 * larger)
        return spaced or larger > 1.4 * smaller or (indented and ended)
