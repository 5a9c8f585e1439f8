"""What the search for the number in flight sees of a server: looks at it, and trials of a number.

Pure. Used by controller.py.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from rag_service.ocr.server_gauges import ServerGauges

# Requests that may wait in the server: enough that no slot idles between two answers.
_WAITING_LEAST, _WAITING_SHARE = 3.0, 0.08
# A server with so much less to do than before was left by others.
_LEFT = 0.75
_EXACT = 1e-9
# Limits that differ by less are one, of which the last so many windows count.
_ALIKE, _LAST = 0.02, 12
# Limits within this factor bring about the same.
_SAME = 1.2
# Windows that make a mean worth believing, and changes that show how much a signal wavers.
_ENOUGH, _WAVERINGS = 2, 3


@dataclass(frozen=True, slots=True)
class Steps:
    """How far a trial goes, and what counts as a difference in throughput."""

    more: float
    less: float
    noise: float


GAUGED = Steps(more=1.25, less=0.88, noise=0.012)
BLIND = Steps(more=1.4, less=0.75, noise=0.06)


@dataclass(frozen=True, slots=True)
class SearchSample:
    """One look."""

    at: float
    # Request-seconds that were open up to now.
    used: float
    gauges: ServerGauges | None


@dataclass(frozen=True, slots=True)
class Trial:
    """A window and what it brought, told in two ways of which either may be unknown.

    `by_times`: our answers a second, from what was open and how long each took. `by_tokens`: the
    whole server's tokens a second. Requests that go out together come back together, and tokens
    come in lumps; a process with few answers knows little from their times.
    """

    at: float
    limit: float
    by_times: float | None
    by_tokens: float | None
    answers: int = 0
    # The share of looks that found the server with nothing to do.
    idle: float = 0.0
    running: float | None = None
    waiting: float | None = None

    @property
    def load(self) -> float | None:
        """Requests in the server."""
        if self.running is None or self.waiting is None:
            return None
        return self.running + self.waiting

    @property
    def useful_share(self) -> float:
        """Of what was sent, the share that runs, with as many waiting as ever need to."""
        if not self.load or self.running is None:
            return 1.0
        return min(1.0, (self.running + enough_waiting(self.running)) / self.load)

    @property
    def is_crowded(self) -> bool:
        """Whether as many wait in the server as ever need to."""
        if self.running is None or self.waiting is None:
            return False
        return self.waiting > enough_waiting(self.running)


class Signal(StrEnum):
    """Which of the two ways a trial's throughput is told in."""

    TIMES = "by_times"
    TOKENS = "by_tokens"

    def of(self, trial: Trial) -> float | None:
        """The trial's throughput, so told."""
        value: float | None = getattr(trial, self.value)
        return value


class Trials:
    """What was tried lately, and what it tells of the limit that is held for right."""

    def __init__(self) -> None:
        self._kept: deque[Trial] = deque()

    def remember(self, trial: Trial, seconds: float) -> None:
        """Keep it, and no other that is so much older."""
        self._kept.append(trial)
        while trial.at - self._kept[0].at > seconds:
            self._kept.popleft()

    def clear(self) -> None:
        """Nothing that was tried says anything any more."""
        self._kept.clear()

    @property
    def before_last(self) -> Trial:
        """Of two at least."""
        return self._kept[-2]

    def alike(self, limit: float) -> list[Trial]:
        """The last at about the limit."""
        return [t for t in self._kept if abs(t.limit / limit - 1) < _ALIKE][-_LAST:]

    def reference(self, signal: Signal, limit: float) -> float | None:
        """What the limit brings, as last seen."""
        seen = [value for t in self.alike(limit) if (value := signal.of(t)) is not None]
        return mean(seen[-2:]) if seen else None

    def wavering(self, signal: Signal, limit: float) -> float | None:
        """By how much two windows of the limit differ; None while that is not known."""
        seen = [value for t in self.alike(limit) if (value := signal.of(t))]
        steps = sorted(abs(after / before - 1) for before, after in pairwise(seen))
        return steps[len(steps) // 2] if len(steps) >= _WAVERINGS else None

    def steadier(self, limit: float) -> Signal:
        """The signal that wavers less; the times of our own answers while that is not known."""
        times, tokens = (self.wavering(signal, limit) for signal in Signal)
        if tokens is None:
            return Signal.TIMES
        if times is None:
            return Signal.TOKENS
        return Signal.TIMES if times <= tokens else Signal.TOKENS

    def best(self, signal: Signal) -> float:
        """The throughput of the limit that has brought most.

        Means of limits that are nearly the same: the luckiest window says nothing.
        """
        alike: dict[int, list[float]] = defaultdict(list)
        for trial in self._kept:
            if (value := signal.of(trial)) is not None:
                alike[round(math.log(trial.limit, _SAME))].append(value)
        tried = [mean(seen) for seen in alike.values() if len(seen) >= _ENOUGH]
        return max(tried, default=mean(value for seen in alike.values() for value in seen))


def have_others_left(before: Trial, after: Trial) -> bool:
    """Whether the server has less to do although this process sends more."""
    if before.load is None or after.load is None:
        return False
    return after.load < _LEFT * before.load


def mean_gain(before: Trial, after: Trial) -> float | None:
    """As `gain_of`, by both signals where both are known: each has its own way to err."""
    gains = [gain for signal in Signal if (gain := _gain(before, after, signal)) is not None]
    return mean(gains) if gains else None


def gain_of(before: Trial, after: Trial) -> float | None:
    """How much of a step came back as throughput: 1 is all; None where no signal saw both."""
    by_tokens = _gain(before, after, Signal.TOKENS)
    return _gain(before, after, Signal.TIMES) if by_tokens is None else by_tokens


def _gain(before: Trial, after: Trial, signal: Signal) -> float | None:
    old, new = signal.of(before), signal.of(after)
    if not old or not new:
        return None
    return (new / old - 1) / (after.limit / before.limit - 1)


def _at(counts: Sequence[tuple[float, float]], when: float) -> float:
    """A counter at a time between two looks."""
    for (at, value), (later, larger) in pairwise(counts):
        if at < later and when <= later:
            return value + (larger - value) * (when - at) / (later - at)
    return counts[-1][1]


def enough_waiting(running: float) -> float:
    """Requests that may wait in a server that runs so many."""
    return max(_WAITING_LEAST, _WAITING_SHARE * running)


def tokens_a_second(samples: Sequence[SearchSample], period: float | None) -> float | None:
    """The server's, over a whole number of periods: tokens come in lumps as often as answers."""
    counts = [(s.at, s.gauges.tokens) for s in samples if s.gauges and s.gauges.tokens]
    if len(counts) < 2 or any(after < before for (_, before), (_, after) in pairwise(counts)):
        return None
    (first, _), (last, total) = counts[0], counts[-1]
    length = last - first
    whole = period * int(length / period + _EXACT) if period else length
    span = whole or length
    return (total - _at(counts, last - span)) / span


def mean_in_flight(samples: Sequence[SearchSample]) -> float:
    """The mean that was open between the first and the last."""
    first, last = samples[0], samples[-1]
    return (last.used - first.used) / (last.at - first.at)


def mean(values: Iterable[float]) -> float:
    """Of one value at least."""
    kept = list(values)
    return sum(kept) / len(kept)
