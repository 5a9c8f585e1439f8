"""The time of a document's pages: bounded however many run into their limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rag_service.pdf.page_times import PageTimes

LIMIT = 30.0


@given(pages=st.integers(1, 5000))
def test_a_document_of_slow_pages_costs_less_than_two_limits(pages: int) -> None:
    times, spent = PageTimes(LIMIT), 0.0
    for _ in range(pages):
        for attempts in (times.with_pixels, times.text_alone):
            if not attempts.given_up:
                spent += attempts.limit
                attempts.note(late=True)
    assert spent < 2 * LIMIT


@given(late=st.lists(st.booleans(), max_size=500))
def test_a_page_costs_at_most_the_limit_and_a_good_one_restores_it(late: list[bool]) -> None:
    times = PageTimes(LIMIT)
    for is_late in late:
        assert times.with_pixels.limit + times.text_alone.limit <= LIMIT + 1e-9
        if times.with_pixels.given_up:
            break
        times.with_pixels.note(late=is_late)
        if not is_late:
            assert times.with_pixels.limit == PageTimes(LIMIT).with_pixels.limit
