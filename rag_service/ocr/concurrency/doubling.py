"""The first phase of the search: double the limit for as long as that is worth it."""

from __future__ import annotations

from collections.abc import Callable

from rag_service.ocr.concurrency.changes import ChangeReason
from rag_service.ocr.concurrency.search_state import SearchState
from rag_service.ocr.concurrency.trials import Trial, have_others_left, mean, mean_gain
from rag_service.ocr.concurrency.windows import length_for


class DoublingPhase:
    """Doubles, measures what each doubling brought, and ends after two that brought too little."""

    def __init__(
        self, state: SearchState, *, is_unknown_server: bool, processes: Callable[[], int]
    ) -> None:
        """`processes` returns how many are known to work on the server."""
        self._state = state
        self._processes = processes
        self._may_double_early = is_unknown_server
        self._is_doubted = False

    def step(self, now: float) -> None:
        """Go on once the server has shown what this limit brings."""
        state = self._state
        if self._shows_batching():
            self._may_double_early = False
            state.move_to(2 * state.limit.base, ChangeReason.DOUBLED_EARLY)
            return
        measured = self._measured(now)
        if measured is not None:
            self._judge_doubling(measured)

    def _shows_batching(self) -> bool:
        """Whether an unknown server may be sent twice the first few requests at once.

        All processes see that at the same time, whichever process sent the requests.
        """
        state = self._state
        gauges = state.samples.newest_gauges
        if not self._may_double_early or gauges is None or state.gauged is None:
            return False
        if not state.gauged.shows_batching(gauges):
            return False
        together = state.limit.base * self._processes()
        return together <= state.tuning.begin_together and state.may_add(2.0)

    def _measured(self, now: float) -> Trial | None:
        """Return what the limit brought, or None if it is too early to say."""
        state, tuning, moved_at = self._state, self._state.tuning, self._state.requests.moved_at
        seconds = state.answers_since(moved_at)
        if not seconds or not state.strategy.can_judge_doubling(state.answers):
            return None
        usual, to_feel = mean(seconds), state.strategy.steps.answers_to_feel
        length = length_for((to_feel + tuning.answers_to_show) * usual, tuning)
        if now - moved_at < tuning.almost * length:
            return None
        return state.measure(state.limit.trial, moved_at + to_feel * usual, now)

    def _judge_doubling(self, measured: Trial) -> None:
        state = self._state
        before, state.doubled_from = state.doubled_from, measured
        self._may_double_early = False
        if before is not None and measured.limit > before.limit:
            gain = self._gain(before, measured)
            if gain is not None and gain < state.strategy.worth_of_doubling(before, measured):
                self._doubt(before)
                return
        self._is_doubted = False
        # If answers wait already, a process that doubles alone sees only what it takes from others.
        is_full = measured.is_crowded(state.tuning) or self._are_answers_late(measured)
        if not is_full and state.may_add(2.0):
            state.move_to(2 * state.limit.base, ChangeReason.DOUBLED)
        else:
            state.settle(state.limit.base, ChangeReason.DOUBLING_STOPPED)

    def _gain(self, before: Trial, after: Trial) -> float | None:
        if have_others_left(before, after, self._state.tuning):
            return None
        return mean_gain(before, after)

    def _doubt(self, before: Trial) -> None:
        """Look a second time at a doubling that brought too little; then end the phase."""
        state = self._state
        self._is_doubted = not self._is_doubted
        if self._is_doubted:
            state.doubled_from = before
        else:
            base = before.limit * state.tuning.after_doubling
            state.settle(base, ChangeReason.DOUBLING_ENDED)

    def _are_answers_late(self, measured: Trial) -> bool:
        """Whether the window's answers took far longer than answers once did."""
        if not measured.by_times:
            return False
        latest = self._state.tuning.late_answer * self._state.answers.shortest_mean
        return measured.limit / measured.by_times > latest
