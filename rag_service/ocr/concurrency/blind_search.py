"""The search in front of a server without gauges: it has only the times of its own answers."""

from __future__ import annotations

from rag_service.ocr.concurrency.answer_times import AnswerTimes
from rag_service.ocr.concurrency.strategy import Strategy
from rag_service.ocr.concurrency.trials import Signal, Trial, Trials
from rag_service.ocr.concurrency.tuning import StrategyTuning


class BlindSearch(Strategy):
    """Steps further, waits longer and bounds the answer time: the queue cannot be seen."""

    @property
    def steps(self) -> StrategyTuning:
        return self._tuning.blind

    def safe_seconds(self, safe: float, *, is_alone: bool) -> float:
        return safe if is_alone else min(safe, self._tuning.blind_seconds)

    def pause_after_answer(self, answers: AnswerTimes) -> float:
        return min(answers.usual or 0.0, answers.last)

    def worth_of_doubling(self, before: Trial, after: Trial) -> float:
        is_trusted = min(before.answers, after.answers) >= self._tuning.trusted_answers
        return self._tuning.worth if is_trusted else self._tuning.worth_few_answers

    def can_judge_doubling(self, answers: AnswerTimes) -> bool:
        """Return False for one answer: the first in a queue shows nothing of those behind it."""
        return answers.count >= self._tuning.gauged.fewest_answers

    def signal(self, trials: Trials, base: float) -> Signal:  # noqa: ARG002
        return Signal.TIMES

    def trusts(self, trial: Trial) -> bool:
        return trial.answers >= self._tuning.trusted_answers
