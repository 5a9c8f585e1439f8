"""This process's part of the requests in flight among all processes at work on the server."""

from __future__ import annotations

from rag_service.ocr.concurrency.changes import ChangeReason
from rag_service.ocr.concurrency.search_state import Phase, SearchState


class FairShare:
    """Takes over the part of processes that have gone, and gives it back when they return.

    What is right for the server stays the same, whichever process sends it.
    """

    def __init__(self, state: SearchState, *, among: int | None, is_known: bool) -> None:
        """`among`: processes that the start was meant for; `is_known`: the start was given."""
        self._state = state
        self._sharing = among
        self._is_known = is_known
        self._is_cold = not is_known
        # The mean limit of all processes, if it is known.
        self._mean: float | None = None
        self.processes = among or 0

    def update(self, processes: int, together: float | None) -> None:
        """Note how many processes are at work, this one included, and their limits together.

        Fewer count only when reported twice: of processes that begin at the same time the first
        are not reported to the last.
        """
        state = self._state
        is_mean_known = together is not None and processes == self.processes
        self._mean = together / processes / state.aim.share if together and is_mean_known else None
        self.processes, processes = processes, max(processes, self.processes)
        before, is_first = self._sharing or processes, self._sharing is None
        self._begin_together(processes, is_first=is_first)
        tuning = state.tuning
        if not is_first and tuning.few_gone < processes / before < tuning.few_come:
            return
        self._sharing = processes
        # A search of an unknown server begins beside others that do the same: it took no one's
        # part.
        if processes < before or state.phase is Phase.STEADY or self._is_known:
            state.move_to(state.limit.base * before / processes, ChangeReason.PROCESSES_CHANGED)
            state.trials.clear()
            state.doubled_from = None

    def even_out(self) -> None:
        """Go a step towards the mean: the parts drift apart, and no part is worth more."""
        base, tuning = self._state.limit.base, self._state.tuning
        if self._mean is not None and abs(self._mean / base - 1) > tuning.even_enough:
            even = base + tuning.evening * (self._mean - base)
            self._state.move_to(even, ChangeReason.EVENED_OUT)

    def _begin_together(self, processes: int, *, is_first: bool) -> None:
        """Let few processes begin with as many requests as eight would on an unknown server."""
        if not self._is_cold or is_first:
            return
        self._is_cold = False
        state, part = self._state, self._state.tuning.begin_together / processes
        if state.phase is Phase.DOUBLING and state.limit.base < part:
            state.move_to(part, ChangeReason.FEW_PROCESSES)
            state.doubled_from = None
