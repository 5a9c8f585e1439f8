"""Trials: windows in which a limit was kept and what it brought, and comparisons between them."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from rag_service.ocr.concurrency.tuning import SearchTuning


@dataclass(frozen=True, slots=True)
class Trial:
    """A window and its throughput by two signals, of which either may be unknown.

    `by_times`: this process's answers a second, from what was open and how long each answer took.
    `by_tokens`: the whole server's tokens a second. Requests that go out together come back
    together, and tokens come in lumps; a process with few answers learns little from their times.
    """

    at: float
    limit: float
    by_times: float | None
    by_tokens: float | None
    answers: int = 0
    # The share of samples that found the server with nothing to do.
    idle: float = 0.0
    # Means of the server's gauges; None without gauges.
    running: float | None = None
    waiting: float | None = None

    @property
    def load(self) -> float | None:
        """Requests in the server."""
        if self.running is None or self.waiting is None:
            return None
        return self.running + self.waiting

    def useful_share(self, tuning: SearchTuning) -> float:
        """Return the share of the sent requests that run, or wait as the server needs it."""
        if not self.load or self.running is None:
            return 1.0
        return min(1.0, (self.running + enough_waiting(self.running, tuning)) / self.load)

    def is_crowded(self, tuning: SearchTuning) -> bool:
        """Whether more requests wait in the server than it needs."""
        if self.running is None or self.waiting is None:
            return False
        return self.waiting > enough_waiting(self.running, tuning)


class Signal(StrEnum):
    """By which of its two figures a trial's throughput is read."""

    TIMES = "by_times"
    TOKENS = "by_tokens"

    def of(self, trial: Trial) -> float | None:
        """Return the trial's throughput by this signal."""
        value: float | None = getattr(trial, self.value)
        return value


class Trials:
    """Recent trials, and what they say about a limit."""

    def __init__(self, tuning: SearchTuning) -> None:
        self._tuning = tuning
        self._kept: deque[Trial] = deque()

    def add(self, trial: Trial, seconds: float) -> None:
        """Keep the trial and drop those older than `seconds` before it."""
        self._kept.append(trial)
        while trial.at - self._kept[0].at > seconds:
            self._kept.popleft()

    def clear(self) -> None:
        """Drop all trials: they no longer describe the server."""
        self._kept.clear()

    @property
    def before_last(self) -> Trial:
        """The trial before the newest; there must be two."""
        return self._kept[-2]

    def at_limit(self, limit: float) -> list[Trial]:
        """Return the newest trials at about the limit."""
        tuning = self._tuning
        same = [t for t in self._kept if abs(t.limit / limit - 1) < tuning.same_limit]
        return same[-tuning.newest_of_limit :]

    def throughput_at(self, signal: Signal, limit: float) -> float | None:
        """Return the mean of the last two windows at the limit, or None if there is none."""
        values = self._values(signal, limit)
        return mean(values[-2:]) if values else None

    def variation(self, signal: Signal, limit: float) -> float | None:
        """Return the median relative difference of two windows in a row; None if unknown."""
        values = [value for value in self._values(signal, limit) if value]
        steps = sorted(abs(after / before - 1) for before, after in pairwise(values))
        return steps[len(steps) // 2] if len(steps) >= self._tuning.enough_changes else None

    def steadier_signal(self, limit: float) -> Signal:
        """Return the signal that varies less; the answers' times while that is unknown."""
        times, tokens = (self.variation(signal, limit) for signal in Signal)
        if tokens is None:
            return Signal.TIMES
        if times is None:
            return Signal.TOKENS
        return Signal.TIMES if times <= tokens else Signal.TOKENS

    def best(self, signal: Signal) -> float:
        """Return the highest mean throughput of any group of similar limits.

        A single window does not count: the luckiest one says nothing.
        """
        tuning = self._tuning
        similar: dict[int, list[float]] = defaultdict(list)
        for trial in self._kept:
            if (value := signal.of(trial)) is not None:
                similar[round(math.log(trial.limit, tuning.similar_limits))].append(value)
        means = [
            mean(values) for values in similar.values() if len(values) >= tuning.enough_windows
        ]
        return max(means, default=mean(value for values in similar.values() for value in values))

    def _values(self, signal: Signal, limit: float) -> list[float]:
        return [v for t in self.at_limit(limit) if (v := signal.of(t)) is not None]


def have_others_left(before: Trial, after: Trial, tuning: SearchTuning) -> bool:
    """Whether the server has less to do although this process sends more."""
    if before.load is None or after.load is None:
        return False
    return after.load < tuning.others_left * before.load


def mean_gain(before: Trial, after: Trial) -> float | None:
    """Return `gain_of` as the mean of both signals, which err in different ways."""
    gains = [gain for signal in Signal if (gain := _gain(before, after, signal)) is not None]
    return mean(gains) if gains else None


def gain_of(before: Trial, after: Trial) -> float | None:
    """Return the part of a step that came back as throughput: 1 is all; None if unknown."""
    by_tokens = _gain(before, after, Signal.TOKENS)
    return _gain(before, after, Signal.TIMES) if by_tokens is None else by_tokens


def _gain(before: Trial, after: Trial, signal: Signal) -> float | None:
    old, new = signal.of(before), signal.of(after)
    if not old or not new:
        return None
    return (new / old - 1) / (after.limit / before.limit - 1)


def enough_waiting(running: float, tuning: SearchTuning) -> float:
    """Return how many requests may wait in a server that runs `running`."""
    return max(tuning.waiting_least, tuning.waiting_share * running)


def mean(values: Iterable[float]) -> float:
    """Return the mean of at least one value."""
    kept = list(values)
    return sum(kept) / len(kept)
