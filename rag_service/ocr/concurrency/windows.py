"""Windows of time: a few lengths, with ends that the wall clock gives to all processes alike."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rag_service.ocr.concurrency.tuning import SearchTuning


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time, in seconds of the wall clock, and the limit at its beginning."""

    began: float
    ends: float
    length: float
    limit: float


def length_for(seconds: float, tuning: SearchTuning) -> float:
    """Return the shortest of the window lengths that lasts `seconds`."""
    wanted = max(1.0, seconds / tuning.shortest_window)
    steps = math.ceil(math.log(wanted, tuning.window_growth))
    return tuning.shortest_window * tuning.window_growth**steps


def window_at(now: float, length: float, limit: float, tuning: SearchTuning) -> Window:
    """Return the window from now to the next common end of windows of this length."""
    ends = (math.floor(now / length) + 1) * length
    if ends - now < tuning.worth_a_window * length:
        ends += length
    return Window(now, ends, length, limit)
