"""What the parts of one search share: the limit, the answers, the samples and the trials."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from rag_service.ocr.concurrency.answer_times import AnswerTimes
from rag_service.ocr.concurrency.blind_search import BlindSearch
from rag_service.ocr.concurrency.changes import ChangeReason
from rag_service.ocr.concurrency.current_limit import CurrentLimit
from rag_service.ocr.concurrency.gauged_search import GaugedSearch
from rag_service.ocr.concurrency.request_account import RequestAccount
from rag_service.ocr.concurrency.strategy import Strategy
from rag_service.ocr.concurrency.trials import Trial, Trials
from rag_service.ocr.concurrency.tuning import SearchTuning
from rag_service.ocr.concurrency.window_samples import Samples


class Phase(StrEnum):
    """What the search does at the end of a window."""

    DOUBLING = "doubling"
    STEADY = "steady"


@dataclass(frozen=True, slots=True)
class Aim:
    """What the search is for.

    `yielded`: the share of throughput given up for shorter answers. `share`: the share of what
    the search finds that is used. `timeout`: seconds after which a request is given up.
    """

    yielded: float = 0.0
    share: float = 1.0
    timeout: float = 1800.0


class SearchState:
    """The state of one search, and the moves that several parts of it make."""

    def __init__(
        self,
        aim: Aim,
        tuning: SearchTuning,
        start: float,
        may_grow: Callable[[], bool],
        server: str,
    ) -> None:
        self.aim = aim
        self.tuning = tuning
        self.phase = Phase.DOUBLING
        self.limit = CurrentLimit(start, aim.share, tuning, server)
        self.answers = AnswerTimes(tuning)
        self.requests = RequestAccount()
        self.samples = Samples(tuning)
        self.trials = Trials(tuning)
        # The trial before the last doubling; None if it no longer describes the server.
        self.doubled_from: Trial | None = None
        self._may_grow = may_grow
        self._gauged, self._blind = GaugedSearch(tuning), BlindSearch(tuning)
        self.gauged: GaugedSearch | None = None

    @property
    def strategy(self) -> Strategy:
        """The strategy for the newest sample: servers gain and lose their gauges."""
        return self.gauged or self._blind

    def note_gauges(self, *, are_shown: bool) -> None:
        """Choose the strategy: whether the newest sample had gauges."""
        self.gauged = self._gauged if are_shown else None

    def account(self, in_flight: int, now: float) -> None:
        """Account for the requests that were open since the last call."""
        self.requests.note(in_flight, now, self.limit.now, self.answers.usual)

    def move_to(self, base: float, reason: ChangeReason) -> None:
        """Go on from another number."""
        self.limit.move_to(base, reason)
        self.requests.note_move()

    def settle(self, base: float, reason: ChangeReason) -> None:
        """Go on steadily from here; what was measured before says nothing about it."""
        self.phase = Phase.STEADY
        self.move_to(base, reason)
        self.trials.clear()

    def may_add(self, factor: float) -> bool:
        """Whether the limit may grow by the factor.

        Answers stay in time, the bound is not reached and memory is free.
        """
        return self.is_safe(factor) and not self.limit.is_at_bound and self._may_grow()

    def is_safe(self, factor: float) -> bool:
        """Whether answers that took `factor` times as long would stay far from the time-out."""
        known = self.answers.usual
        return known is None or known * factor <= self.safe_seconds(factor)

    def safe_seconds(self, factor: float) -> float:
        """Return the longest safe answer at `factor` times the limit that is right."""
        safe = self.tuning.safe_share * self.aim.timeout
        return self.strategy.safe_seconds(safe, is_alone=self.limit.base * factor <= 1)

    def measure(self, limit: float, since: float, now: float) -> Trial | None:
        """Return what the limit brought since then; None if it was not kept or not used up."""
        if self.limit.trial != limit:
            return None
        return self.samples.measure(
            limit,
            self.limit.now,
            self.answers_since(since),
            since=since,
            until=now,
            answers=self.answers,
            fewest_answers=self.strategy.steps.fewest_answers,
        )

    def answers_since(self, since: float) -> list[float]:
        """Return the answers' times; while the search doubles, only of those sent at this limit."""
        sent_from = self.requests.moved_at if self.phase is Phase.DOUBLING else -math.inf
        return self.answers.since(since, sent_from=sent_from)
