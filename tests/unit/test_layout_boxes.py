"""From a model's boxes to blocks: on the page, without doubles, in reading order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rag_service.layout.boxes import bbox_of, in_order, without_overlaps
from rag_service.layout.labels import LABELS
from rag_service.layout.page_layout import Bbox, LayoutBox

PART = st.floats(-0.5, 1.5)
COORDINATE = st.integers(0, 999)


@st.composite
def boxes(draw) -> LayoutBox:
    left, top = draw(COORDINATE), draw(COORDINATE)
    right, bottom = draw(st.integers(left + 1, 1000)), draw(st.integers(top + 1, 1000))
    score = draw(st.floats(0.3, 1))
    return LayoutBox(draw(st.sampled_from(LABELS)), score, (left, top, right, bottom))


def text(*bbox: int, score: float = 0.9, label: str = "text") -> LayoutBox:
    return LayoutBox(label, score, bbox)  # type: ignore[arg-type]


def shuffled_and_ordered(*expected: LayoutBox) -> None:
    """The order must not depend on the order in which the model names the boxes."""
    for drawn in (expected, expected[::-1], expected[1::2] + expected[::2]):
        assert in_order(drawn) == list(expected)


@given(PART, PART, PART, PART)
def test_a_bbox_lies_on_the_page_and_has_an_area(x1, y1, x2, y2) -> None:
    bbox = bbox_of(x1, y1, x2, y2)
    if bbox is not None:
        left, top, right, bottom = bbox
        assert 0 <= left < right <= 1000
        assert 0 <= top < bottom <= 1000


def test_a_box_outside_the_page_or_with_swapped_corners_is_none() -> None:
    assert bbox_of(1.1, 0.1, 1.3, 0.2) is None
    assert bbox_of(0.5, 0.5, 0.4, 0.6) is None
    assert bbox_of(0.5, 0.5, 0.5001, 0.6) is None


def test_columns_are_read_one_after_the_other_between_full_width_blocks() -> None:
    shuffled_and_ordered(
        text(100, 50, 900, 90, label="doc_title"),
        text(60, 120, 480, 300),
        text(60, 310, 480, 600),
        text(520, 120, 940, 400),
        text(520, 410, 940, 600),
        text(60, 640, 940, 760),
    )


def test_three_columns() -> None:
    shuffled_and_ordered(
        text(50, 100, 330, 400), text(50, 410, 330, 900),
        text(360, 100, 640, 500), text(360, 510, 640, 900),
        text(670, 100, 950, 300), text(670, 310, 950, 900),
    )  # fmt: skip


def test_a_title_that_overlaps_the_columns_a_little_does_not_mix_them() -> None:
    shuffled_and_ordered(
        text(100, 50, 900, 104, label="doc_title"),
        text(60, 100, 480, 300),
        text(60, 300, 480, 600),
        text(520, 100, 940, 350),
        text(520, 350, 940, 600),
    )


def test_a_formula_comes_before_its_number_and_a_row_goes_from_left_to_right() -> None:
    shuffled_and_ordered(
        text(100, 100, 900, 200),
        text(300, 220, 600, 240, label="display_formula"),
        text(860, 221, 900, 239, label="formula_number"),
        text(100, 260, 900, 400),
    )


@given(st.lists(boxes(), max_size=12))
def test_ordering_loses_and_adds_no_box(drawn) -> None:
    assert sorted(in_order(drawn), key=repr) == sorted(drawn, key=repr)


def test_a_box_inside_another_is_removed_and_the_order_is_kept() -> None:
    table = text(100, 400, 900, 800, label="table")
    above, below = text(100, 100, 900, 300), text(100, 820, 900, 900)
    cell = text(120, 420, 400, 460)
    assert without_overlaps([below, cell, table, above]) == [below, table, above]


def test_of_two_boxes_of_one_block_the_one_with_the_higher_score_is_kept() -> None:
    sure, unsure = text(100, 100, 900, 300), text(102, 99, 898, 303, score=0.5, label="abstract")
    assert without_overlaps([unsure, sure]) == [sure]
    assert without_overlaps([sure, unsure]) == [sure]
    assert without_overlaps([sure, sure]) == [sure]


def test_a_picture_inside_a_text_is_kept() -> None:
    column, photo = text(100, 100, 900, 900), text(200, 200, 400, 400, label="image")
    assert without_overlaps([column, photo]) == [column, photo]


def test_a_picture_of_the_whole_page_does_not_replace_its_blocks() -> None:
    picture, block = text(0, 0, 1000, 990, label="image"), text(100, 100, 900, 300)
    assert without_overlaps([picture, block]) == [block]
    assert without_overlaps([picture]) == [picture]


@given(st.lists(boxes(), max_size=12))
def test_every_dropped_box_is_covered_by_a_kept_one(drawn) -> None:
    kept = without_overlaps(drawn)
    assert bool(kept) == bool(drawn)
    assert [box for box in drawn if box in kept] == kept or len(set(drawn)) < len(drawn)
    for box in drawn:
        assert box in kept or any(_touches(box.bbox, other.bbox) for other in kept)


def _touches(one: Bbox, other: Bbox) -> bool:
    return (
        min(one[2], other[2]) > max(one[0], other[0])
        and min(one[3], other[3]) > max(one[1], other[1])
    )  # fmt: skip
