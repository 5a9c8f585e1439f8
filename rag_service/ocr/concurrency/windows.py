"""Time cut into windows of a few lengths, the same for all processes. Used by controller.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

SHORTEST = 8.0
_LONGER = 1.5
# Less than this share of a window is left: it is taken into the next one.
_WORTH_ITSELF = 0.6


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time and the limit at its beginning."""

    began: float
    ends: float
    length: float
    limit: float


def length_for(seconds: float) -> float:
    """The least of the lengths that is so long."""
    wanted = max(1.0, seconds / SHORTEST)
    return SHORTEST * _LONGER ** math.ceil(math.log(wanted, _LONGER))


def window_at(now: float, length: float, limit: float) -> Window:
    """From now to where a window of the length ends for everybody."""
    ends = (math.floor(now / length) + 1) * length
    if ends - now < _WORTH_ITSELF * length:
        ends += length
    return Window(now, ends, length, limit)
