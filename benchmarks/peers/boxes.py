"""Layouts that replace a layout model's findings."""

from __future__ import annotations

from rag_service.layout.page_layout import LayoutBox

# One region: the whole page as text.
WHOLE_PAGE = (LayoutBox("text", 1.0, (0, 0, 1000, 1000)),)

# An ordinary page of two columns: twelve regions to read, a picture to keep, three to drop.
ORDINARY_PAGE = tuple(
    LayoutBox(label, 1.0, bbox)
    for label, bbox in (
        ("header", (80, 30, 920, 50)),
        ("doc_title", (80, 70, 920, 120)),
        ("abstract", (80, 135, 920, 220)),
        ("paragraph_title", (80, 240, 490, 262)),
        ("text", (80, 270, 490, 430)),
        ("text", (80, 440, 490, 600)),
        ("display_formula", (80, 615, 490, 660)),
        ("text", (80, 675, 490, 900)),
        ("image", (510, 240, 920, 380)),
        ("figure_title", (510, 388, 920, 420)),
        ("text", (510, 435, 920, 560)),
        ("table", (510, 580, 920, 740)),
        ("paragraph_title", (510, 755, 920, 777)),
        ("text", (510, 785, 920, 900)),
        ("footnote", (80, 915, 490, 940)),
        ("number", (480, 955, 520, 970)),
    )
)
NOT_READ = frozenset({"header", "image", "footnote", "number"})
