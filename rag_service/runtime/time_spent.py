"""The time that the pages of a run used in its present stage, which outlives a turn on a fork."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """`seconds` of a render child, and attempts in a row that ran into their limit.

    `late_pages`: with the page's drawing; `late_texts`: by its text alone.
    """

    seconds: float = 0.0
    late_pages: int = 0
    late_texts: int = 0
