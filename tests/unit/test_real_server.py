"""The rate that real_server compares settings by."""

from __future__ import annotations

import pytest

from benchmarks.real_server import Look, answers_per_second

LUMP_SECONDS, ANSWERS_A_LUMP, TOKENS = 11.0, 64, 1000


def look(at: float, tokens: float | None) -> Look:
    return Look(at, done=0, tokens=tokens, in_flight=0, running=None, waiting=None, worker_mib=0.0)


def lumpy(at: float) -> float:
    """Tokens up to now of a server that gives nothing for half of each lump."""
    whole, part = divmod(at, LUMP_SECONDS)
    return (whole + max(0.0, 2 * part / LUMP_SECONDS - 1)) * ANSWERS_A_LUMP * TOKENS


@pytest.mark.parametrize("first", range(int(LUMP_SECONDS)))
def test_where_a_lump_is_cut_does_not_matter(first: int) -> None:
    looks = [look(first + at, lumpy(first + at)) for at in range(65)]
    rate = answers_per_second(looks, TOKENS)
    assert rate == pytest.approx(ANSWERS_A_LUMP / LUMP_SECONDS, rel=0.01)


def test_no_rate_of_a_server_that_does_not_count_its_tokens() -> None:
    assert answers_per_second([look(at, None) for at in range(3)], TOKENS) is None
