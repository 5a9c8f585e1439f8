"""Tables that a page draws with ruled lines. Runs in the render child.

Only a drawn grid counts: text that is merely aligned in columns stays text.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rag_service.pdf.child.extraction import Line, PageContent, PdfBox, Stroke, Word
from rag_service.pdf.child.text_cleanup import clean

# Fewer drawings cannot form a grid; more are a map or a chart and take long.
MIN_DRAWINGS, MAX_DRAWINGS = 5, 4000
RULE_THICKNESS = 3.0
MIN_RULE = 8.0
# Rules whose ends are this close meet, in points.
JOIN = 3.0
MIN_CROSSED_RULES, MIN_CROSSINGS = 3, 2
FRAME_SHARE = 0.9
MIN_FILLED_CELLS, FILLED_SHARE = 4, 0.25


class Rule(NamedTuple):
    """A rule at y = `at` from x = `start` to `end`; for a vertical rule, x and y are swapped."""

    at: float
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Grid:
    """Edges of the columns (x) and rows (y), and the vertical rules that separate cells."""

    columns: list[float]
    rows: list[float]
    verticals: list[Rule]

    @property
    def box(self) -> PdfBox:
        return PdfBox(self.columns[0], self.rows[0], self.columns[-1], self.rows[-1])


@dataclass(frozen=True, slots=True)
class Table:
    """A grid and its cells, row by row."""

    box: PdfBox
    cells: list[list[str]]


def find_tables(content: PageContent) -> list[Table]:
    """Return the page's ruled tables that contain text."""
    if not MIN_DRAWINGS <= content.drawings <= MAX_DRAWINGS:
        return []
    lines = [line for block in content.blocks for line in block.lines]
    tables = (_fill(grid, lines, content) for grid in _grids(content))
    return [table for table in tables if table is not None]


def to_markdown(table: Table) -> str:
    """Return a pipe table; its first row becomes the header, which the format requires."""
    rows = ["| " + " | ".join(_escape(cell) for cell in row) + " |" for row in table.cells]
    return "\n".join([rows[0], "|" + " --- |" * len(table.cells[0]), *rows[1:]])


def _escape(cell: str) -> str:
    return cell.replace("\\", "\\\\").replace("|", "\\|")


def _grids(content: PageContent) -> list[Grid]:
    horizontals, verticals = _rules(content)
    if len(horizontals) < MIN_CROSSED_RULES or len(verticals) < MIN_CROSSINGS:
        return []
    grids = []
    for across, down in _connected(horizontals, verticals):
        grid = _grid(across, down)
        if grid is not None:
            grids.append(grid)
    return grids


def _rules(content: PageContent) -> tuple[list[Rule], list[Rule]]:
    horizontals: list[Rule] = []
    verticals: list[Rule] = []
    for stroke in content.strokes():
        if _is_frame(stroke, content):
            continue
        x0, y0, x1, y1 = stroke.box
        if y1 - y0 <= RULE_THICKNESS:
            horizontals.append(Rule((y0 + y1) / 2, x0, x1))
        elif x1 - x0 <= RULE_THICKNESS:
            verticals.append(Rule((x0 + x1) / 2, y0, y1))
        elif stroke.rectangle and min(stroke.box.width, stroke.box.height) >= MIN_RULE:
            horizontals += (Rule(y0, x0, x1), Rule(y1, x0, x1))
            verticals += (Rule(x0, y0, y1), Rule(x1, y0, y1))
    return _merged(horizontals), _merged(verticals)


def _is_frame(stroke: Stroke, content: PageContent) -> bool:
    """Return True for a border or a background of the whole page."""
    return (
        stroke.box.width >= FRAME_SHARE * content.width
        and stroke.box.height >= FRAME_SHARE * content.height
    )


def _merged(rules: list[Rule]) -> list[Rule]:
    """Join the pieces of each line to one rule, sorted by `at`; rules too short are dropped."""
    lanes: list[list[Rule]] = []
    for rule in sorted(rules):
        if lanes and rule.at - lanes[-1][0].at <= JOIN:
            lanes[-1].append(rule)
        else:
            lanes.append([rule])
    return [rule for lane in lanes for rule in _joined(lane) if rule.end - rule.start >= MIN_RULE]


def _joined(lane: list[Rule]) -> list[Rule]:
    """Join the rules of one lane at the place of the first, without overlaps and small gaps."""
    at = lane[0].at
    joined: list[Rule] = []
    for _, start, end in sorted(lane, key=lambda rule: rule.start):
        if joined and start <= joined[-1].end + JOIN:
            joined[-1] = Rule(at, joined[-1].start, max(end, joined[-1].end))
        else:
            joined.append(Rule(at, start, end))
    return joined


def _connected(
    horizontals: list[Rule], verticals: list[Rule]
) -> list[tuple[list[Rule], list[Rule]]]:
    """Return sets of rules that are connected by crossings."""
    sets: list[tuple[set[Rule], set[Rule]]] = []
    for horizontal in horizontals:
        crossed = _crossed_by(horizontal, verticals)
        if len(crossed) < MIN_CROSSINGS:
            continue
        merged = ({horizontal}, crossed)
        for known in [known for known in sets if known[1] & crossed]:
            merged = (merged[0] | known[0], merged[1] | known[1])
            sets.remove(known)
        sets.append(merged)
    return [
        (sorted(across), sorted(down)) for across, down in sets if len(across) >= MIN_CROSSED_RULES
    ]


def _crossed_by(horizontal: Rule, verticals: list[Rule]) -> set[Rule]:
    """Return the vertical rules that cross this one; `verticals` are sorted by `at`."""
    first = bisect_left(verticals, (horizontal.start - JOIN,))
    last = bisect_right(verticals, (horizontal.end + JOIN, float("inf")))
    low, high = horizontal.at + JOIN, horizontal.at - JOIN
    return {rule for rule in verticals[first:last] if rule.start <= low and rule.end >= high}


def _grid(across: list[Rule], down: list[Rule]) -> Grid | None:
    columns = _distinct(rule.at for rule in down)
    rows = _distinct(rule.at for rule in across)
    # In tables without outer verticals, the horizontals give the edges of the outer columns.
    left, right = min(rule.start for rule in across), max(rule.end for rule in across)
    if left < columns[0] - 2 * MIN_RULE:
        columns.insert(0, left)
    if right > columns[-1] + 2 * MIN_RULE:
        columns.append(right)
    if len(columns) < 3 or len(rows) < 3:
        return None
    return Grid(columns, rows, down)


def _distinct(positions: Iterable[float]) -> list[float]:
    distinct: list[float] = []
    for position in sorted(positions):
        if not distinct or position - distinct[-1] > JOIN:
            distinct.append(position)
    return distinct


def _fill(grid: Grid, lines: Sequence[Line], content: PageContent) -> Table | None:
    cells: list[list[list[str]]] = [[[] for _ in grid.columns[1:]] for _ in grid.rows[1:]]
    words: list[Word] | None = None
    for line in lines:
        place = _cell(grid, line.box)
        if place is None:
            continue
        if not _crosses_a_rule(line.box, grid):
            cells[place[0]][place[1]].append(line.raw)
            continue
        words = content.words() if words is None else words
        for word in words:
            place = _cell(grid, word.box) if _within(word.box, line.box) else None
            if place is not None:
                cells[place[0]][place[1]].append(word.text)
    texts = [[" ".join(clean(" ".join(cell)).split()) for cell in row] for row in cells]
    filled = sum(bool(cell) for row in texts for cell in row)
    if filled < max(MIN_FILLED_CELLS, FILLED_SHARE * len(texts) * len(texts[0])):
        return None
    return Table(grid.box, [row for row in texts if any(row)])


def _cell(grid: Grid, box: PdfBox) -> tuple[int, int] | None:
    """Return the row and column that contain a box's middle height and its left end."""
    middle = (box.y0 + box.y1) / 2
    start = min(box.x0 + JOIN, (box.x0 + box.x1) / 2)
    row = bisect_right(grid.rows, middle) - 1
    column = bisect_right(grid.columns, start) - 1
    inside = 0 <= row < len(grid.rows) - 1 and 0 <= column < len(grid.columns) - 1
    return (row, column) if inside else None


def _crosses_a_rule(box: PdfBox, grid: Grid) -> bool:
    middle = (box.y0 + box.y1) / 2
    return any(
        box.x0 + JOIN < rule.at < box.x1 - JOIN and rule.start <= middle <= rule.end
        for rule in grid.verticals
    )


def _within(box: PdfBox, outer: PdfBox) -> bool:
    x, y = (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
    return outer.x0 <= x <= outer.x1 and outer.y0 <= y <= outer.y1
