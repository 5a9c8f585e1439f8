"""A page's own text as Markdown: headings, lists, code, tables, paragraphs in reading order.

Runs in the render child.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from rag_service.layout.reading_order import MIN_COLUMN_LINES, PlacedPiece, in_reading_order
from rag_service.pdf.child import ruled_tables
from rag_service.pdf.child.extraction import Block, Line, PageContent, PdfBox
from rag_service.pdf.child.text_cleanup import clean

# Size relative to the page's most common size, and the heading mark for it.
HEADING_SIZES = ((1.7, "# "), (1.35, "## "), (1.15, "### "))
BOLD_HEADING = "### "
MAX_HEADING_ROWS, MAX_HEADING, MAX_BOLD_HEADING = 3, 200, 100
MIN_CODE_ROWS = 2
# Lines of one paragraph: the largest gap in line heights, the largest indent in font sizes.
MAX_LINE_GAP, MAX_INDENT = 1.0, 2.0
# The shortest line of running text, in font sizes.
MIN_MEASURE = 12.0
# The first code point of Chinese, Japanese and Korean characters.
FIRST_CJK = "\u2e80"
# Lines are on one row if they share this much of their height.
SAME_ROW = 0.5

_BULLET = re.compile(r"(?:[•‣◦▪▫●○■□∙⁃➢➤➔✓✔\uf0b7\uf0a7\uf0d8\uf0fc]\s*|[-*·]\s+)(?=\S)")
_NUMBERED = re.compile(r"(?:\d{1,3}|[a-zA-Z])[.)]\s+\S")
_SYNTAX = re.compile(r"(?=#{1,6}\s|>|```|~~~)")
_SOFT_HYPHEN_END = re.compile("\xad\\s*$")
_LEADER = re.compile(r"\s*(?:\.\s?){4,}")
_ENTRY = re.compile(r"… \w{1,6}$")
_LETTER_OR_DIGIT = re.compile(r"[^\W_]")


@dataclass(slots=True)
class PageRow:
    """The text on one baseline of a block; `spaced`: a space follows it in the file."""

    box: PdfBox
    size: float
    bold: bool
    mono: bool
    text: str
    indent: int
    spaced: bool


@dataclass(frozen=True, slots=True)
class Style:
    """The page's ordinary text."""

    size: float
    bold: bool


def to_markdown(content: PageContent) -> str:
    """Return the whole page as Markdown; "" if it has no readable text."""
    tables = ruled_tables.find_tables(content)
    blocks = _outside(content.blocks, tables) if tables else content.blocks
    blocks = _split_across_columns(blocks)
    style = _body_style(blocks)
    parts: list[str] = []
    pending: list[PageRow] = []
    for piece in in_reading_order(_pieces(blocks, tables)):
        if piece.place < len(blocks):
            rows = _rows(blocks[piece.place].lines)
            if _share_a_row(pending, rows):
                _extend(pending[-1], rows[0])
                pending += rows[1:]
            elif _continues(pending, rows):
                pending += rows
            else:
                parts += _to_parts(pending, style)
                pending = rows
        else:
            table = tables[piece.place - len(blocks)]
            parts += [*_to_parts(pending, style), ruled_tables.to_markdown(table)]
            pending = []
    return "\n\n".join(parts + _to_parts(pending, style))


def _split_across_columns(blocks: list[Block]) -> list[Block]:
    """Split blocks that span several columns, as in files drawn row by row, into their lines."""
    beside = [_lines_side_by_side(block) for block in blocks]
    if sum(beside) < MIN_COLUMN_LINES:
        return blocks
    parts: list[Block] = []
    for block, spans_columns in zip(blocks, beside, strict=True):
        parts += [Block(line.box, [line]) for line in block.lines] if spans_columns else [block]
    return parts


def _lines_side_by_side(block: Block) -> int:
    return sum(_same_row(left.box, right.box) for left, right in pairwise(block.lines))


def _pieces(blocks: Sequence[Block], tables: Sequence[ruled_tables.Table]) -> list[PlacedPiece]:
    pieces = [
        PlacedPiece(place, block.box, len(block.lines), sum(len(line.raw) for line in block.lines))
        for place, block in enumerate(blocks)
    ]
    for place, table in enumerate(tables, start=len(blocks)):
        characters = sum(len(cell) for row in table.cells for cell in row)
        pieces.append(PlacedPiece(place, table.box, len(table.cells), characters))
    return pieces


def _share_a_row(above: Sequence[PageRow], below: Sequence[PageRow]) -> bool:
    return bool(above and below) and _same_row(above[-1].box, below[0].box)


def _continues(above: Sequence[PageRow], below: Sequence[PageRow]) -> bool:
    """Return True if MuPDF cut a paragraph or a listing with wide line spacing into blocks."""
    if not above or not below:
        return True
    last, first = above[-1], below[0]
    gap = first.box.y0 - last.box.y1
    if not -last.box.height < gap <= MAX_LINE_GAP * last.box.height or last.mono != first.mono:
        return False
    if last.mono:
        return True
    if abs(last.size - first.size) > 0.5 or last.bold != first.bold:
        return False
    if abs(last.box.x0 - first.box.x0) > MAX_INDENT * last.size or not _is_full(last):
        return False
    right = max(row.box.x1 for row in (*above, *below))
    return not _starts_item(first.text) and not _is_intended_break(last, first, right)


def _outside(blocks: Sequence[Block], tables: Sequence[ruled_tables.Table]) -> list[Block]:
    """Return the blocks without the lines that are in tables."""
    kept = []
    for block in blocks:
        lines = [line for line in block.lines if not any(_is_in(line.box, t.box) for t in tables)]
        if len(lines) == len(block.lines):
            kept.append(block)
        elif lines:
            kept.append(Block(_around(line.box for line in lines), lines))
    return kept


def _is_in(box: PdfBox, outer: PdfBox) -> bool:
    x, y = (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
    return outer.x0 <= x <= outer.x1 and outer.y0 <= y <= outer.y1


def _union(left: PdfBox, right: PdfBox) -> PdfBox:
    x0, y0, x1, y1 = left
    other_x0, other_y0, other_x1, other_y1 = right
    return PdfBox(min(x0, other_x0), min(y0, other_y0), max(x1, other_x1), max(y1, other_y1))


def _around(boxes: Iterable[PdfBox]) -> PdfBox:
    x0, y0, x1, y1 = zip(*boxes, strict=True)
    return PdfBox(min(x0), min(y0), max(x1), max(y1))


def _body_style(blocks: Sequence[Block]) -> Style:
    exactly: defaultdict[tuple[float, bool], int] = defaultdict(int)
    for block in blocks:
        for _, size, bold, _, raw in block.lines:
            exactly[size, bold] += len(raw)
    letters: Counter[tuple[float, bool]] = Counter()
    for (size, bold), count in exactly.items():
        letters[round(size), bold] += count
    (size, bold), _ = letters.most_common(1)[0] if letters else ((0.0, False), 0)
    return Style(size, bold)


def _to_parts(rows: Sequence[PageRow], style: Style) -> list[str]:
    if len(rows) >= MIN_CODE_ROWS and all(row.mono for row in rows):
        return [_code(rows)]
    parts: list[str] = []
    for prefix, group in _by_heading(rows, style):
        if prefix:
            parts.append(prefix + " ".join(row.text for row in group))
        else:
            parts.append(_paragraph(group))
    return parts


def _rows(lines: Sequence[Line]) -> list[PageRow]:
    rows: list[PageRow] = []
    for line in lines:
        row = _row(line)
        if not row.text:
            continue
        if rows and _same_row(rows[-1].box, row.box):
            _extend(rows[-1], row)
        else:
            rows.append(row)
    return rows


def _row(line: Line) -> PageRow:
    box, size, bold, mono, raw = line
    solid = _SOFT_HYPHEN_END.sub("-", raw) if "\xad" in raw else raw
    indented = _shortened(clean(solid).rstrip())
    text = indented.lstrip()
    return PageRow(box, size, bold, mono, text, len(indented) - len(text), raw[-1:].isspace())


def _shortened(text: str) -> str:
    """Replace leaders, the dots that lead to a page number, which disturb search and readers."""
    if "...." in text or ". . . ." in text:
        return _LEADER.sub(" … ", text).rstrip()
    return text


def _same_row(left: PdfBox, right: PdfBox) -> bool:
    _, left_y0, left_x1, left_y1 = left
    right_x0, right_y0, _, right_y1 = right
    # Usually decided here: the next line begins further left.
    if right_x0 < left_x1 - 1:
        return False
    shared = min(left_y1, right_y1) - max(left_y0, right_y0)
    return shared > SAME_ROW * min(left_y1 - left_y0, right_y1 - right_y0)


def _extend(row: PageRow, more: PageRow) -> None:
    """Add the text that is further right on the row."""
    if len(more.text) > len(row.text):
        row.size = more.size
    row.box = _union(row.box, more.box)
    row.bold = row.bold and more.bold
    row.mono = row.mono and more.mono
    row.text = f"{row.text} {more.text}"
    row.spaced = more.spaced


def _by_heading(rows: Sequence[PageRow], style: Style) -> Iterator[tuple[str, list[PageRow]]]:
    """Yield groups of rows with their heading mark; ordinary rows have the mark ""."""
    for mark, run in groupby(rows, key=lambda row: _heading_mark(row, style)):
        group = list(run)
        yield (mark if mark and _is_heading(group, mark) else ""), group


def _is_heading(rows: Sequence[PageRow], mark: str) -> bool:
    text = " ".join(row.text for row in rows)
    longest = MAX_BOLD_HEADING if mark == BOLD_HEADING else MAX_HEADING
    if len(rows) > MAX_HEADING_ROWS or not 1 < len(text) <= longest:
        return False
    ends_as_heading = text[-1] not in ".,;:"
    return ends_as_heading and not _BULLET.match(text) and bool(_LETTER_OR_DIGIT.search(text))


def _heading_mark(row: PageRow, style: Style) -> str:
    emphasised = row.bold and not style.bold and row.size >= style.size
    if not emphasised and row.size < HEADING_SIZES[-1][0] * style.size:
        return ""
    if row.mono:
        return ""
    for ratio, mark in HEADING_SIZES:
        if row.size >= ratio * style.size:
            return mark
    return BOLD_HEADING


def _paragraph(rows: Sequence[PageRow]) -> str:
    """Join rows to running text; intended line breaks are kept."""
    right = max(row.box.x1 for row in rows)
    text = _item(rows[0].text)
    for above, row in pairwise(rows):
        if _is_broken_word(text) and row.text[0].islower():
            text = text[:-1] + row.text
        elif _starts_item(row.text) or _is_intended_break(above, row, right):
            text += "\n" + _item(row.text)
        else:
            text += ("" if _is_one_word(above, row) else " ") + row.text
    return text


def _item(text: str) -> str:
    bulleted = _BULLET.sub("- ", text, count=1) if _BULLET.match(text) else text
    return _SYNTAX.sub(r"\\", bulleted, count=1) if _SYNTAX.match(bulleted) else bulleted


def _is_broken_word(text: str) -> bool:
    return text[-1] in "-\u2010" and text[-2:-1].isalpha()


def _is_one_word(above: PageRow, row: PageRow) -> bool:
    """Return True for CJK text, which breaks lines anywhere, if the line ends without a space."""
    cjk = above.text[-1] >= FIRST_CJK and row.text[0] >= FIRST_CJK
    return cjk and not above.spaced and _is_full(above)


def _is_full(row: PageRow) -> bool:
    """Return True if the row is long enough for running text, unlike lines of an address."""
    return row.box.width >= MIN_MEASURE * row.size


def _starts_item(text: str) -> bool:
    return bool(_BULLET.match(text) or _NUMBERED.match(text))


def _is_intended_break(above: PageRow, row: PageRow, right: float) -> bool:
    """Return True if the next word would have fitted, or the row is an entry of a contents list."""
    if "…" in above.text and _ENTRY.search(above.text):
        return True
    letter = above.box.width / len(above.text)
    first_word = row.text.split(" ", 1)[0]
    return right - above.box.x1 > (len(first_word) + 1.5) * letter


def _code(rows: Sequence[PageRow]) -> str:
    left = min(row.box.x0 for row in rows)
    letter = max(rows, key=lambda row: len(row.text))
    width = letter.box.width / len(letter.text) or 1.0
    lines = (" " * (row.indent + round((row.box.x0 - left) / width)) + row.text for row in rows)
    return "```\n" + "\n".join(lines) + "\n```"
