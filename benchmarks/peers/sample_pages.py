"""Pages of labelled blocks that a server can tell apart by their pictures, and what it reads.

A block's number stands in a row of black and white cells
across its upper part, so it is read from any crop of it at any size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from rag_service.layout.page_layout import Bbox, LayoutBox

WIDTH, HEIGHT = 595, 842
# The first cell is always black and the last always white.
_BITS = 8
_CELLS = _BITS + 2
_BAND = 0.4
_FILLER = "The quick brown fox jumps over the lazy dog. " * 8


@dataclass(frozen=True)
class Block:
    """A block of a page and what a model would answer for it."""

    number: int
    label: str
    bbox: Bbox
    answer: str

    @property
    def box(self) -> LayoutBox:
        """As a layout model would find it."""
        return LayoutBox(self.label, 1.0, self.bbox)


def stacked(
    first: int, blocks: Sequence[tuple[str, str]], width: int = 830, height: int = 60
) -> list[Block]:
    """Blocks of (label, answer) below one another, numbered from `first`, each a bit narrower."""
    tops = [60 + index * (height + 12) for index in range(len(blocks))]
    return [
        Block(first + index, label, (83, top, 83 + width - 7 * index, top + height), answer)
        for index, ((label, answer), top) in enumerate(zip(blocks, tops, strict=True))
    ]


def write(path: Path, pages: Iterable[Sequence[Block]]) -> None:
    """A PDF of these pages, without colour."""
    from rag_service.pdf.child.mupdf import pymupdf

    with pymupdf.open() as document:
        for blocks in pages:
            page = document.new_page(width=WIDTH, height=HEIGHT)
            for block in blocks:
                _draw(page, block)
        document.save(path)


def break_page(path: Path, target: Path, number: int) -> None:
    """A copy of the PDF in which page `number` cannot be drawn: it stands for a circle of pages."""
    from rag_service.pdf.child.mupdf import pymupdf

    with pymupdf.open(path) as document:
        page = document[number - 1].xref
        _, parent = document.xref_get_key(page, "Parent")
        document.update_object(page, f"<</Type/Pages/Count 1/Kids[{page} 0 R]/Parent {parent}>>")
        document.save(target)


def number_in(picture: Image.Image) -> int | None:
    """The number of the block that the picture shows; None where it shows no single one."""
    grey = picture.convert("L").resize((_CELLS * 8, 10), Image.Resampling.BOX)
    cells = [grey.getpixel((index * 8 + 4, 2)) for index in range(_CELLS)]
    dark = [isinstance(cell, int) and cell < 128 for cell in cells]
    if not dark[0] or dark[-1]:
        return None
    return sum(1 << index for index, bit in enumerate(dark[1:-1]) if bit)


def _draw(page: Any, block: Block) -> None:
    left, top, right, bottom = (
        side * (HEIGHT if index % 2 else WIDTH) / 1000 for index, side in enumerate(block.bbox)
    )
    bits = [True, *(bool(block.number >> place & 1) for place in range(_BITS)), False]
    wide, deep = (right - left) / _CELLS, (bottom - top) * _BAND
    for index, bit in enumerate(bits):
        if bit:
            cell = (left + index * wide, top, left + (index + 1) * wide, top + deep)
            page.draw_rect(cell, color=None, fill=0)
    page.insert_textbox((left, top + deep, right, bottom), _FILLER, fontsize=7)
