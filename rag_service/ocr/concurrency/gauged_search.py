"""The search in front of a server that shows gauges: it sees what runs, waits and is generated."""

from __future__ import annotations

from rag_service.ocr.concurrency.answer_times import AnswerTimes
from rag_service.ocr.concurrency.strategy import Strategy
from rag_service.ocr.concurrency.trials import Signal, Trial, Trials, enough_waiting, mean
from rag_service.ocr.concurrency.tuning import StrategyTuning
from rag_service.ocr.server_gauges import ServerGauges


class GaugedSearch(Strategy):
    """Judges by the steadier of two signals and cuts the queue that the server shows."""

    @property
    def steps(self) -> StrategyTuning:
        return self._tuning.gauged

    def safe_seconds(self, safe: float, *, is_alone: bool) -> float:  # noqa: ARG002
        return safe

    def pause_after_answer(self, answers: AnswerTimes) -> float:
        return answers.usual or 0.0

    def worth_of_doubling(self, before: Trial, after: Trial) -> float:  # noqa: ARG002
        return self._tuning.worth

    def can_judge_doubling(self, answers: AnswerTimes) -> bool:  # noqa: ARG002
        return True

    def signal(self, trials: Trials, base: float) -> Signal:
        return trials.steadier_signal(base)

    def trusts(self, trial: Trial) -> bool:  # noqa: ARG002
        return True

    def shows_batching(self, gauges: ServerGauges) -> bool:
        """Whether the server works on several requests at once and none waits."""
        tuning = self._tuning
        return (
            gauges.running >= tuning.batching_running and gauges.waiting < tuning.batching_waiting
        )

    def queue_cut(self, last: list[ServerGauges], tried_share: float) -> float | None:
        """Return the factor to cut a too long queue by, or None if it is short enough.

        `tried_share`: the part of the limit that a trial adds; it may wait until the trial ends.
        """
        tuning = self._tuning
        running, waiting = mean(g.running for g in last), mean(g.waiting for g in last)
        allowed = enough_waiting(running, tuning)
        tried = tried_share * (running + waiting)
        if waiting <= tuning.waiting_factor * allowed + tried:
            return None
        return max(tuning.cut_queue, (running + allowed) / (running + waiting))
