"""Sizes of crops: whole tokens within bounds, exactly the box, rounded as in the glmocr SDK."""

from __future__ import annotations

from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rag_service.pdf.child.crops import TOKEN_SIDE, CropSize, fit, for_layout, pixels_of
from rag_service.pdf.child.raster import Raster

BOUNDS = CropSize(6272, 3500)
SIDES = st.integers(1, 65_500)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((1096, 61), (1092, 56)),
        ((1240, 1754), (1232, 1764)),
        # Halves go to the even multiple, as Python rounds.
        ((70, 126), (56, 112)),
        # 84 x 84 are 7,056 pixels, enough; 84 x 56 are not.
        ((84, 84), (84, 84)),
        ((84, 56), (112, 84)),
        ((10, 10), (84, 84)),
        ((3, 300), (28, 812)),
        ((7000, 1000), (3500, 504)),
    ],
)
def test_the_nearest_whole_tokens(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert fit(*size, BOUNDS) == expected


@given(SIDES, SIDES, st.integers(1, 20_000), st.integers(448, 8000))
def test_a_crop_is_whole_tokens_within_its_bounds(
    width: int, height: int, least: int, longest: int
) -> None:
    bounds = CropSize(least, longest)
    sides = fit(width, height, bounds)
    assert all(side % TOKEN_SIDE == 0 and TOKEN_SIDE <= side <= longest for side in sides)
    full = longest // TOKEN_SIDE * TOKEN_SIDE
    assert sides[0] * sides[1] >= least or full in sides


@given(st.integers(60, 3400), st.integers(200, 3400))
def test_a_crop_keeps_its_size_up_to_half_a_token(width: int, height: int) -> None:
    sides = fit(width, height, BOUNDS)
    if sides[0] * sides[1] > 4 * BOUNDS.min_pixels:
        assert abs(sides[0] - width) <= TOKEN_SIDE / 2
        assert abs(sides[1] - height) <= TOKEN_SIDE / 2


@st.composite
def boxes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    left, right = sorted(draw(st.sets(st.integers(0, 1000), min_size=2, max_size=2)))
    top, bottom = sorted(draw(st.sets(st.integers(0, 1000), min_size=2, max_size=2)))
    return left, top, right, bottom


@given(boxes(), SIDES, SIDES)
def test_a_box_has_pixels_and_all_are_on_the_page(
    box: tuple[int, int, int, int], width: int, height: int
) -> None:
    left, top, right, bottom = pixels_of(box, (width, height))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


def test_edges_are_rounded_down() -> None:
    assert pixels_of((0, 0, 1000, 1000), (1241, 1755)) == (0, 0, 1241, 1755)
    assert pixels_of((333, 500, 667, 501), (1241, 1755)) == (413, 877, 827, 879)


@pytest.mark.parametrize(
    ("size", "small"),
    [
        ((1240, 1754), (800, 1132)),
        ((600, 700), (600, 700)),
        ((900, 20_000), (72, 1600)),
        ((32, 60_000), (1, 1600)),
    ],
)
def test_the_layout_picture_is_as_large_as_the_model_can_use(
    size: tuple[int, int], small: tuple[int, int]
) -> None:
    page = for_layout(Raster(1, Image.new("L", size), 150), 80)
    assert (page.width, page.height, page.grey) == (*size, True)
    assert Image.open(BytesIO(page.jpeg)).size == small
