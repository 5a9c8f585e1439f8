"""Measurement of a window: from samples of the server and answers of this process to a trial."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rag_service.ocr.concurrency.answer_times import AnswerTimes
from rag_service.ocr.concurrency.trials import Trial, mean
from rag_service.ocr.concurrency.tuning import SearchTuning
from rag_service.ocr.server_gauges import ServerGauges

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class SearchSample:
    """One sample: its time, the request-seconds used up to then, the server's gauges if any."""

    at: float
    used: float
    gauges: ServerGauges | None


class Samples:
    """Samples about a second apart, newest last."""

    def __init__(self, tuning: SearchTuning) -> None:
        self._tuning = tuning
        self._kept: deque[SearchSample] = deque(maxlen=tuning.kept_samples)

    def add(self, sample: SearchSample) -> None:
        self._kept.append(sample)

    @property
    def newest_gauges(self) -> ServerGauges | None:
        return self._kept[-1].gauges

    def last_gauges(self, count: int) -> list[ServerGauges]:
        """Return the gauges of the last `count` samples, without those that have none."""
        return [s.gauges for s in list(self._kept)[-count:] if s.gauges]

    def measure(
        self,
        limit: float,
        in_use: float,
        seconds: Sequence[float],
        *,
        since: float,
        until: float,
        answers: AnswerTimes,
        fewest_answers: int,
    ) -> Trial | None:
        """Return what `limit` brought; None if it was not used up, or nothing was seen.

        `in_use` is the part of the limit that may be used, `seconds` the times of the answers.
        """
        samples = [s for s in self._kept if s.at > since]
        if len(samples) < 2:
            return None
        in_flight = _mean_in_flight(samples)
        if in_flight < self._tuning.used_share * in_use * self._busy_share(in_use):
            return None
        times = answers.rate(in_flight, seconds, fewest_answers)
        tokens = _tokens_per_second(samples, mean(seconds) if seconds else answers.usual)
        if times is None and tokens is None:
            return None
        seen = [s.gauges for s in samples if s.gauges]
        if not seen:
            return Trial(until, limit, times, tokens, len(seconds))
        idle = mean(g.running == 0 for g in seen)
        running, waiting = mean(g.running for g in seen), mean(g.waiting for g in seen)
        return Trial(until, limit, times, tokens, len(seconds), idle, running, waiting)

    def _busy_share(self, in_use: float) -> float:
        """Below 1 the limit itself is the share of time in which a request is open."""
        return 1.0 if in_use >= 1 else self._tuning.used_share_below_one


def _mean_in_flight(samples: Sequence[SearchSample]) -> float:
    """Return the mean that was open between the first sample and the last."""
    first, last = samples[0], samples[-1]
    return (last.used - first.used) / (last.at - first.at)


def _tokens_per_second(samples: Sequence[SearchSample], period: float | None) -> float | None:
    """Return the server's rate over a whole number of periods.

    Tokens come in lumps as often as answers do, so a part of a period would show a wrong rate.
    """
    counts = [(s.at, s.gauges.tokens) for s in samples if s.gauges and s.gauges.tokens]
    if len(counts) < 2 or any(after < before for (_, before), (_, after) in pairwise(counts)):
        return None
    (first, _), (last, total) = counts[0], counts[-1]
    length = last - first
    whole = period * int(length / period + _ROUNDING) if period else length
    span = whole or length
    return (total - _count_at(counts, last - span)) / span


def _count_at(counts: Sequence[tuple[float, float]], when: float) -> float:
    """Return a counter's value at a time between two samples."""
    for (at, value), (later, larger) in pairwise(counts):
        if at < later and when <= later:
            return value + (larger - value) * (when - at) / (later - at)
    return counts[-1][1]
