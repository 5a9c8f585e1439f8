"""Shares pages out to jobs of nearly equal length. Used by payload.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

# Another worker's cold start costs more than so few pages.
FEWEST_PAGES = 4


def ranges(pages: Sequence[int], most: int, workers: int) -> list[tuple[int, ...]]:
    """Pages in ranges of at most `most`, so many that an endpoint of `workers` has all at work.

    More ranges than workers come in whole rounds, so that none waits for a last one alone.
    """
    if not pages:
        return []
    parts = max(math.ceil(len(pages) / most), min(workers, len(pages) // FEWEST_PAGES), 1)
    if parts > workers:
        parts = math.ceil(parts / workers) * workers
    return balanced(pages, parts)


def balanced(pages: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """Pages in order in at most `parts` ranges whose lengths differ by one at most."""
    parts = min(parts, len(pages))
    length, longer = divmod(len(pages), parts)
    starts = [number * length + min(number, longer) for number in range(parts + 1)]
    return [tuple(pages[a:b]) for a, b in pairwise(starts)]
