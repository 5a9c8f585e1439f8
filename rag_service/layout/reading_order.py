"""Sorts the blocks of a page into reading order, for text layers and for a model's boxes.

A page is cut into bands across its whole width; neighbouring bands with a common gutter are one
set of columns. Without a sign of columns, the pieces' own order is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

# Points by which the boxes of tightly set lines overlap.
SLACK = 2.0
MIN_GUTTER = 5.0
# A column is prose: labels beside a text and the columns of a table are not.
MIN_COLUMN_LINES = 3
MIN_COLUMN_CHARACTERS = 15
MIN_COLUMN_OVERLAP = 0.3


class Rectangle(Protocol):
    """A rectangle in points, origin at the shown page's top left."""

    @property
    def x0(self) -> float: ...
    @property
    def y0(self) -> float: ...
    @property
    def x1(self) -> float: ...
    @property
    def y1(self) -> float: ...


class PlacedPiece(NamedTuple):
    """A block on the page; `place` identifies it and is its order if there are no columns."""

    place: int
    box: Rectangle
    lines: int
    characters: int


class _Span(NamedTuple):
    start: float
    end: float


class _Columns(NamedTuple):
    left: list[PlacedPiece]
    right: list[PlacedPiece]


def in_reading_order(pieces: Sequence[PlacedPiece]) -> list[PlacedPiece]:
    """Return the same pieces in reading order."""
    downwards = sorted(pieces, key=lambda piece: piece.box.y0)
    return downwards if _runs_downwards(downwards) else _ordered(list(pieces))


def _runs_downwards(pieces: Sequence[PlacedPiece]) -> bool:
    return all(after.box.y0 >= before.box.y1 - SLACK for before, after in pairwise(pieces))


def _ordered(pieces: list[PlacedPiece]) -> list[PlacedPiece]:
    result: list[PlacedPiece] = []
    for group in _groups(_bands(pieces)):
        columns = _columns(group)
        if columns is None:
            result += group
        else:
            result += _ordered(columns.left) + _ordered(columns.right)
    return result


def _bands(pieces: list[PlacedPiece]) -> list[list[PlacedPiece]]:
    """Cut at every horizontal gap between all pieces; each band keeps the file's order."""
    bands: list[list[PlacedPiece]] = []
    bottom = float("-inf")
    for piece in sorted(pieces, key=lambda piece: piece.box.y0):
        if piece.box.y0 >= bottom - SLACK:
            bands.append([])
        bands[-1].append(piece)
        bottom = max(bottom, piece.box.y1)
    for band in bands:
        band.sort()
    return bands


def _groups(bands: list[list[PlacedPiece]]) -> list[list[PlacedPiece]]:
    """Join neighbouring bands with a common gutter if that makes columns; else keep the bands."""
    groups: list[list[PlacedPiece]] = []
    run: list[list[PlacedPiece]] = []
    # What the run covers from left to right, so that a long run is not searched for each band.
    covered: list[_Span] = []
    for band in bands:
        spans = [_Span(piece.box.x0, piece.box.x1) for piece in band]
        together = _joined(covered + spans)
        if run and len(together) < 2:
            groups += _columns_or_bands(run)
            run, together = [], _joined(spans)
        run.append(band)
        covered = together
    return groups + _columns_or_bands(run)


def _joined(spans: list[_Span]) -> list[_Span]:
    """Join spans without a gutter between them, from left to right."""
    joined: list[_Span] = []
    for span in sorted(spans):
        if joined and span.start - joined[-1].end < MIN_GUTTER:
            joined[-1] = _Span(joined[-1].start, max(joined[-1].end, span.end))
        else:
            joined.append(span)
    return joined


def _columns_or_bands(run: list[list[PlacedPiece]]) -> list[list[PlacedPiece]]:
    if len(run) == 1:
        return run
    together = [piece for band in run for piece in band]
    return [together] if _columns(together) is not None else run


def _columns(pieces: list[PlacedPiece]) -> _Columns | None:
    """Split at the widest gutter that has prose on both sides."""
    if len(pieces) < 2:
        return None
    across = sorted(pieces, key=lambda piece: piece.box.x0)
    for position in _gutters(across):
        left, right = across[:position], across[position:]
        if _is_column(left) and _is_column(right) and _stand_side_by_side(left, right):
            return _Columns(sorted(left), sorted(right))
    return None


def _gutters(across: list[PlacedPiece]) -> list[int]:
    """Return the positions after vertical gaps between all pieces, the widest gap first.

    `across` is sorted from left to right.
    """
    gutters: list[tuple[float, int]] = []
    right_edge = across[0].box.x1
    for position, piece in enumerate(across):
        gap = piece.box.x0 - right_edge
        if gap >= MIN_GUTTER:
            gutters.append((gap, position))
        right_edge = max(right_edge, piece.box.x1)
    return [position for _, position in sorted(gutters, reverse=True)]


def _is_column(pieces: list[PlacedPiece]) -> bool:
    lines = sum(piece.lines for piece in pieces)
    characters = sum(piece.characters for piece in pieces)
    return lines >= MIN_COLUMN_LINES and characters >= MIN_COLUMN_CHARACTERS * lines


def _stand_side_by_side(left: list[PlacedPiece], right: list[PlacedPiece]) -> bool:
    spans = [
        (min(piece.box.y0 for piece in side), max(piece.box.y1 for piece in side))
        for side in (left, right)
    ]
    shared = min(bottom for _, bottom in spans) - max(top for top, _ in spans)
    return shared >= MIN_COLUMN_OVERLAP * min(bottom - top for top, bottom in spans)
