"""The resolution of a page: enough to read, never more pixels than the cap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_service.pdf.child.image_files import choose_scale
from rag_service.pdf.child.render import MIN_SIDE, choose_resolution

CAP = 16_000_000


def test_an_ordinary_page_gets_the_requested_resolution() -> None:
    resolution = choose_resolution(595, 842, 150, CAP)
    assert (resolution.dpi, resolution.capped) == (150, False)


@given(st.floats(0, 100_000), st.floats(0, 100_000), st.integers(50, 600))
def test_no_page_exceeds_the_cap(width: float, height: float, dpi: int) -> None:
    resolution = choose_resolution(width, height, dpi, CAP)
    pixels = width / 72 * resolution.dpi * height / 72 * resolution.dpi
    assert pixels <= CAP * 1.001
    assert max(width, height) / 72 * resolution.dpi <= 65_501
    if not resolution.capped:
        assert resolution.dpi >= dpi


def test_a_page_below_the_smallest_side_is_enlarged() -> None:
    assert choose_resolution(3, 4, 150, CAP).dpi * 3 / 72 == pytest.approx(MIN_SIDE)


@given(
    st.integers(1, 60_000), st.integers(1, 60_000),
    st.one_of(st.none(), st.floats(100, 1200)), st.integers(50, 600),
)  # fmt: skip
def test_a_picture_is_never_enlarged(
    width: int, height: int, paper: float | None, dpi: int
) -> None:
    resolution, scale = choose_scale((width, height), paper, dpi, CAP)
    assert 0 < scale <= 1
    assert width * scale * height * scale <= CAP * 1.001
    if paper is not None and not resolution.capped:
        assert resolution.dpi == pytest.approx(min(dpi, paper))
