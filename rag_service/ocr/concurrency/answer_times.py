"""How long answers took: recent ones, their running mean, and the shortest mean of a window."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from rag_service.ocr.concurrency.trials import mean
from rag_service.ocr.concurrency.tuning import SearchTuning


class AnswerTimes:
    """Seconds from a request to its answer, for the answers of one process."""

    def __init__(self, tuning: SearchTuning) -> None:
        self._tuning = tuning
        # Running mean; None before the first answer.
        self.usual: float | None = None
        self.last = 0.0
        self.last_end = -math.inf
        self.shortest_mean = math.inf
        self._recent: deque[tuple[float, float]] = deque(maxlen=tuning.kept_answers)

    @property
    def count(self) -> int:
        """Answers that are remembered."""
        return len(self._recent)

    def add(self, seconds: float, now: float) -> None:
        """Note an answer that came now."""
        self.last_end, self.last = now, seconds
        self._recent.append((now, seconds))
        weight = self._tuning.answer_weight
        known = self.usual
        self.usual = seconds if known is None else (1 - weight) * known + weight * seconds

    def note_timeout(self, now: float) -> None:
        """Note that a request ended now without an answer."""
        self.last_end = now

    def since(self, when: float, *, sent_from: float = -math.inf) -> list[float]:
        """Return the times of answers after `when` to requests sent from `sent_from` on."""
        return [took for at, took in self._recent if at > when and at - took >= sent_from]

    def rate(self, in_flight: float, seconds: Sequence[float], fewest: int) -> float | None:
        """Return answers a second by Little's law; None if there are fewer than `fewest`."""
        if len(seconds) < fewest:
            return None
        usual = mean(seconds)
        growth = self._tuning.shortest_mean_growth
        self.shortest_mean = min(self.shortest_mean * growth, usual)
        return in_flight / usual

    def are_queued(self) -> bool:
        """Whether answers take far longer than they once did."""
        known = self.usual
        return known is not None and known > self._tuning.queued_answer * self.shortest_mean
