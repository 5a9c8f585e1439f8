"""The layout of a page: labelled boxes in reading order. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# x1, y1, x2, y2 in thousandths of the page's width and height; x1 < x2, y1 < y2.
Bbox = tuple[int, int, int, int]


class Task(StrEnum):
    """What is done with a box: read in one of three ways, kept as a picture, or left out."""

    TEXT = "text"
    TABLE = "table"
    FORMULA = "formula"
    PICTURE = "picture"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class LayoutBox:
    """A block of a page; `label` is one of the 25 of PP-DocLayoutV3, `score` 0 to 1."""

    label: str
    score: float
    bbox: Bbox


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The boxes of a page in reading order, and the name of the model that found them."""

    boxes: tuple[LayoutBox, ...]
    model: str
