"""Cuts of the limit at once: after a time-out, a late answer, or for a queue in the server."""

from __future__ import annotations

import math

from rag_service.ocr.concurrency.changes import ChangeReason
from rag_service.ocr.concurrency.search_state import SearchState


class Cuts:
    """Cuts the limit, and then waits until the cut has shown its effect."""

    def __init__(self, state: SearchState) -> None:
        self._state = state
        self._none_before = -math.inf

    def after_answer(self, seconds: float, now: float) -> None:
        """Cut if this answer and the usual one come near the client's time-out."""
        state, tuning = self._state, self._state.tuning
        is_late = seconds > state.safe_seconds(1.0)
        if is_late and not state.is_safe(1.0) and now >= self._none_before:
            pause = tuning.pause_late * (state.answers.usual or 0.0)
            self._cut(tuning.cut_late, now + pause, ChangeReason.ANSWER_LATE)

    def after_timeout(self, now: float) -> None:
        """Cut because a request was given up."""
        tuning = self._state.tuning
        self._cut(tuning.cut_timed_out, now + tuning.pause_timed_out, ChangeReason.TIMED_OUT)

    def for_queue(self, now: float) -> None:
        """Cut so far that only the requests that the server needs wait in it."""
        state, tuning = self._state, self._state.tuning
        last = state.samples.last_gauges(tuning.waiting_samples)
        is_known = state.gauged is not None and len(last) == tuning.waiting_samples
        if not is_known or state.gauged is None or now < self._none_before:
            return
        tried_share = max(0.0, 1 - state.limit.base / state.limit.trial)
        factor = state.gauged.queue_cut(last, tried_share)
        if factor is not None:
            pause = max(tuning.pause_queue, self._drained_in())
            self._cut(factor, now + pause, ChangeReason.QUEUE_TOO_LONG)

    def wait_for_trial(self, now: float) -> None:
        """Cut nothing until what a trial sent has left the server."""
        self._none_before = max(self._none_before, now + self._drained_in())

    def _cut(self, factor: float, none_before: float, reason: ChangeReason) -> None:
        self._none_before = none_before
        self._state.settle(self._state.limit.base * factor, reason)

    def _drained_in(self) -> float:
        """Return the seconds until what waits in the server shows that less is sent."""
        tuning = self._state.tuning
        return tuning.drained_after * (self._state.answers.usual or tuning.shortest_window)
