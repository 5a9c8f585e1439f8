"""Reading order and paragraphs, from rectangles only."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.servers.cpu_ocr.ocr_engine import TextBox
from workers.servers.cpu_ocr.text_order import to_text

LINE = 20


def box(x: float, y: float, text: str, confidence: float = 0.99, height: float = 16) -> TextBox:
    return TextBox(x, y, x + 8 * len(text), y + height, text, confidence)


def column(x: float, y: float, name: str, rows: int) -> list[TextBox]:
    return [box(x, y + LINE * i, f"{name} line {i} of a column of prose") for i in range(rows)]


def words_in_order(text: str, *words: str) -> bool:
    places = [text.index(word) for word in words]
    return places == sorted(places)


def test_columns_are_read_one_after_the_other_between_full_width_text() -> None:
    boxes = [
        box(100, 20, "A headline that crosses both of the columns of this page"),
        *column(50, 80, "left", 5),
        *column(420, 80, "right", 5),
        box(100, 220, "A closing line that crosses both of the columns as well"),
    ]
    text = to_text(reversed(boxes))
    assert words_in_order(text, "headline", "left line 0", "left line 4", "right line 0",
                          "right line 4", "closing")  # fmt: skip


def test_three_columns() -> None:
    boxes = [b for x, n in ((20, "one"), (340, "two"), (660, "three")) for b in column(x, 0, n, 4)]
    assert words_in_order(to_text(boxes), "one line 3", "two line 0", "two line 3", "three line 0")


def test_a_list_of_prices_is_read_row_by_row() -> None:
    goods = ["Brown bread", "Milk, one litre", "Six free-range eggs", "Butter"]
    boxes = [box(20, LINE * i, g) for i, g in enumerate(goods)]
    boxes += [box(500, LINE * i, f"{i}.49") for i in range(len(goods))]
    assert to_text(boxes).split("\n") == [f"{g} {i}.49" for i, g in enumerate(goods)]


def test_a_longer_column_keeps_its_last_line() -> None:
    text = to_text([*column(20, 0, "left", 6), *column(400, 0, "right", 5)])
    assert words_in_order(text, "left line 5", "right line 0")


def test_a_gap_divides_paragraphs() -> None:
    boxes = [*column(20, 0, "first", 3), *column(20, 3 * LINE + 20, "second", 3)]
    first, second = to_text(boxes).split("\n\n")
    assert first.count("\n") == 2
    assert second.startswith("second line 0")


def test_a_word_hyphenated_at_a_line_end_is_joined() -> None:
    assert to_text([box(20, 0, "the state of the docu-"), box(20, 20, "ments is good")]) == (
        "the state of the documents\nis good"
    )
    assert "state-of-\n" in to_text([box(20, 0, "a state-of-"), box(20, 20, "the-art thing")])


def test_unsure_boxes_are_dropped_and_sideways_text_comes_last() -> None:
    stamp = TextBox(0, 0, 20, 300, "stamp on the edge", 0.9)
    assert to_text([stamp, box(40, 50, "a line"), box(200, 50, "?", 0.2)]) == (
        "a line\n\nstamp on the edge"
    )


def test_no_boxes_no_text() -> None:
    assert to_text([]) == ""


side = st.integers(0, 2000)


@given(st.lists(st.tuples(side, side, st.integers(0, 600), st.integers(0, 90)), max_size=60))
def test_every_box_is_in_the_text_exactly_once(places: list[tuple[int, int, int, int]]) -> None:
    boxes = [TextBox(x, y, x + w, y + h, f"W{i}W", 0.9) for i, (x, y, w, h) in enumerate(places)]
    assert sorted(to_text(boxes).split()) == sorted(b.text for b in boxes)
