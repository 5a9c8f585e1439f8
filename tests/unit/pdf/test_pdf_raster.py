"""The cache of drawn pages: the newest, within its memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rag_service.pdf.child.raster import Raster, RasterCache

BOUND = 100


def raster(number: int, size: int = 10, mode: str = "L") -> Raster:
    return Raster(number, Image.new(mode, (size, 1)), 150)


def test_colour_takes_three_times_as_much() -> None:
    assert (raster(1, 7).bytes, raster(1, 7, "RGB").bytes) == (7, 21)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 150)), max_size=30))
def test_the_newest_are_kept_within_the_bound(drawn: list[tuple[int, int]]) -> None:
    cache = RasterCache(BOUND)
    for number, size in drawn:
        cache.keep(raster(number, size), 150)
        kept = [page for n in range(1, 7) if (page := cache.get(n, 150)) is not None]
        assert number in {page.number for page in kept}
        assert len(kept) == 1 or sum(page.bytes for page in kept) <= BOUND


def test_the_oldest_goes_first() -> None:
    cache = RasterCache(BOUND)
    for number in (1, 2, 3):
        cache.keep(raster(number, 40), 150)
    assert cache.get(1, 150) is None
    assert cache.get(2, 150) is not None
    cache.keep(raster(2, 40), 150)
    cache.keep(raster(4, 40), 150)
    assert cache.get(3, 150) is None
    assert cache.get(2, 150) is not None


def test_another_resolution_is_another_raster() -> None:
    cache = RasterCache(BOUND)
    cache.keep(raster(1), 150)
    assert cache.get(1, 100) is None
    cache.clear()
    assert cache.get(1, 150) is None
