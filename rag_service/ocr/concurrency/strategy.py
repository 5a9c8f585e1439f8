"""What the search does differently with gauges and without: the common interface."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rag_service.ocr.concurrency.answer_times import AnswerTimes
from rag_service.ocr.concurrency.trials import Signal, Trial, Trials
from rag_service.ocr.concurrency.tuning import SearchTuning, StrategyTuning


class Strategy(ABC):
    """How a server is read; the phases of the search ask it wherever gauges matter."""

    def __init__(self, tuning: SearchTuning) -> None:
        self._tuning = tuning

    @property
    @abstractmethod
    def steps(self) -> StrategyTuning:
        """The constants of this strategy."""

    @abstractmethod
    def safe_seconds(self, safe: float, *, is_alone: bool) -> float:
        """Return the longest answer that is far enough from the time-out, of `safe` seconds.

        `is_alone`: this process has at most one request open.
        """

    @abstractmethod
    def pause_after_answer(self, answers: AnswerTimes) -> float:
        """Return the answer time by which a limit below 1 spaces its requests."""

    @abstractmethod
    def worth_of_doubling(self, before: Trial, after: Trial) -> float:
        """Return the share of a doubling that must come back as throughput."""

    @abstractmethod
    def can_judge_doubling(self, answers: AnswerTimes) -> bool:
        """Whether there are answers enough to judge a doubling."""

    @abstractmethod
    def signal(self, trials: Trials, base: float) -> Signal:
        """Return the signal to judge trials by."""

    @abstractmethod
    def trusts(self, trial: Trial) -> bool:
        """Whether one look at the trial is enough when it shows a clear result."""
