"""Divide pages among jobs of nearly equal length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

# For fewer pages another worker's cold start costs more than it gains.
MIN_PAGES = 4


def ranges(pages: Sequence[int], max_pages: int, workers: int) -> list[tuple[int, ...]]:
    """Divide pages into ranges of at most `max_pages`, enough to keep all `workers` busy.

    More ranges than workers are a multiple of them, so that no worker reads a last one alone.
    """
    if not pages:
        return []
    parts = max(math.ceil(len(pages) / max_pages), min(workers, len(pages) // MIN_PAGES), 1)
    if parts > workers:
        parts = math.ceil(parts / workers) * workers
    return balanced(pages, parts)


def balanced(pages: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """Divide pages in order into at most `parts` ranges whose lengths differ by one at most."""
    parts = min(parts, len(pages))
    length, longer = divmod(len(pages), parts)
    starts = [number * length + min(number, longer) for number in range(parts + 1)]
    return [tuple(pages[a:b]) for a, b in pairwise(starts)]
