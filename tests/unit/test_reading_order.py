"""The order in which blocks are read does not depend on the order of drawing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rag_service.layout.reading_order import PlacedPiece, in_reading_order
from rag_service.pdf.child.extraction import PdfBox

LINE = 40  # characters


def piece(place: int, x0: float, y0: float, x1: float, y1: float, lines: int = 5) -> PlacedPiece:
    return PlacedPiece(place, PdfBox(x0, y0, x1, y1), lines, lines * LINE)


def places(pieces: list[PlacedPiece]) -> list[int]:
    return [piece.place for piece in in_reading_order(pieces)]


def test_from_top_to_bottom_with_a_footer_drawn_first() -> None:
    footer, top, middle = (
        piece(0, 70, 760, 500, 770), piece(1, 70, 60, 500, 200), piece(2, 70, 220, 500, 400),
    )  # fmt: skip
    assert places([footer, top, middle]) == [1, 2, 0]


def test_two_columns_under_a_title() -> None:
    drawn_by_rows = [
        piece(0, 70, 50, 540, 80, lines=1),
        piece(1, 70, 100, 295, 300), piece(2, 315, 100, 540, 280),
        piece(3, 70, 320, 295, 600), piece(4, 315, 300, 540, 590),
        piece(5, 70, 700, 540, 720, lines=1),
    ]  # fmt: skip
    assert places(drawn_by_rows) == [0, 1, 3, 2, 4, 5]


def test_columns_drawn_line_by_line() -> None:
    rows = [
        piece(2 * row + column, 70 + 240 * column, 100 + 20 * row, 290 + 240 * column,
              112 + 20 * row, lines=1)
        for row in range(6)
        for column in range(2)
    ]  # fmt: skip
    assert places(rows) == [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11]


def test_three_columns() -> None:
    columns = [piece(n, 40 + 180 * n, 100, 200 + 180 * n, 600) for n in (2, 0, 1)]
    assert places(columns) == [0, 1, 2]


def test_a_label_beside_a_text_stays_with_it() -> None:
    rows = []
    for row in range(4):
        top = 100 + 60 * row
        rows.append(PlacedPiece(2 * row, PdfBox(70, top, 100, top + 12), 1, 4))
        rows.append(piece(2 * row + 1, 130, top, 500, top + 50))
    assert places(rows) == list(range(8))


BOXES = st.tuples(
    st.floats(0, 600), st.floats(0, 800), st.floats(1, 300), st.floats(1, 300), st.integers(1, 9)
)


@given(st.lists(BOXES, max_size=30))
def test_nothing_is_lost_or_doubled(boxes: list[tuple[float, float, float, float, int]]) -> None:
    pieces = [
        piece(n, x, y, x + width, y + height, lines)
        for n, (x, y, width, height, lines) in enumerate(boxes)
    ]
    assert sorted(places(pieces)) == list(range(len(boxes)))
