"""The time of a document's pages: bounded however many run into their limit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_service.pdf.page_times import PageTimes
from rag_service.runtime.time_spent import TimeSpent

LIMIT = 30.0


@given(pages=st.integers(1, 5000))
def test_a_document_of_slow_pages_costs_less_than_two_limits(pages: int) -> None:
    times, spent = PageTimes(LIMIT, math.inf), 0.0
    for _ in range(pages):
        for attempts in (times.with_pixels, times.text_alone):
            if not attempts.given_up:
                spent += attempts.limit
                attempts.note(late=True)
    assert spent < 2 * LIMIT


@given(late=st.lists(st.booleans(), max_size=500))
def test_a_page_costs_at_most_the_limit_and_a_good_one_restores_it(late: list[bool]) -> None:
    times = PageTimes(LIMIT, math.inf)
    for is_late in late:
        assert times.with_pixels.limit + times.text_alone.limit <= LIMIT + 1e-9
        if times.with_pixels.given_up:
            break
        times.with_pixels.note(late=is_late)
        if not is_late:
            assert times.with_pixels.limit == PageTimes(LIMIT, math.inf).with_pixels.limit


def test_pages_that_are_each_in_time_use_up_the_time_of_the_document() -> None:
    times = PageTimes(LIMIT, 600.0)
    for _ in range(30):
        assert not times.used_up
        times.charge(20.0)
    assert times.used_up


@pytest.mark.parametrize(("late_pages", "late_texts"), [(5, 0), (5, 5), (2, 1)])
def test_what_was_spent_in_an_earlier_turn_counts_on(late_pages: int, late_texts: int) -> None:
    spent = TimeSpent(599.0, late_pages, late_texts)
    times = PageTimes(LIMIT, 600.0, spent)
    assert times.spent == spent
    assert times.with_pixels.given_up == times.drawing.given_up == (late_pages == 5)
    assert times.text_alone.given_up == (late_texts == 5)
    times.charge(1.0)
    assert times.used_up
