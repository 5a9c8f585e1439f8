"""How many requests one process keeps open to one OCR server: a search that never ends.

Pure: it is given what was sent, answered and sampled, with the time of each, and has no clock.
Every process searches on its own, and all do so in step: the wall clock cuts time into windows
that are the same for all, and in the same windows all try a little less or a little more. So each
sees what its step brings when every process makes it, without a message between them.
docs/concurrency.md describes the phases, the signals and the reasons of changes.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from rag_service.ocr.concurrency.changes import ChangeLog
from rag_service.ocr.concurrency.cuts import Cuts
from rag_service.ocr.concurrency.doubling import DoublingPhase
from rag_service.ocr.concurrency.fair_share import FairShare
from rag_service.ocr.concurrency.search_state import Aim, Phase, SearchState
from rag_service.ocr.concurrency.steady import SteadyPhase
from rag_service.ocr.concurrency.tuning import TUNING, SearchTuning
from rag_service.ocr.concurrency.window_samples import SearchSample
from rag_service.ocr.concurrency.windows import Window, length_for, window_at
from rag_service.ocr.server_gauges import ServerGauges


class ConcurrencySearch:
    """The search of one process for one server."""

    def __init__(
        self,
        aim: Aim,
        *,
        start: float | None = None,
        among: int | None = None,
        may_grow: Callable[[], bool] = lambda: True,
        chance: random.Random | None = None,
        tuning: SearchTuning = TUNING,
        server: str = "",
    ) -> None:
        """`start`: what was right before, for each of `among` processes; it may still double.

        `server` names the server in the log.
        """
        self._state = SearchState(aim, tuning, start or 1.0, may_grow, server)
        self._tuning = tuning
        self._cuts = Cuts(self._state)
        is_known = start is not None
        self._fair_share = FairShare(self._state, among=among, is_known=is_known)
        self._doubling = DoublingPhase(
            self._state,
            is_unknown_server=not is_known,
            processes=lambda: self._fair_share.processes,
        )
        self._steady = SteadyPhase(self._state, self._cuts, self._fair_share)
        self._window: Window | None = None
        # An idle server invites a request although its turn has not come.
        self._is_invited = False
        self._chance = chance or random.Random()

    @property
    def phase(self) -> Phase:
        """What the search does at the end of a window."""
        return self._state.phase

    @property
    def is_settled(self) -> bool:
        """Whether the usual number was found to be right."""
        return self._state.phase is Phase.STEADY

    @property
    def usual(self) -> float:
        """The limit without the trial that may be under way."""
        return self._state.limit.usual

    @property
    def limit(self) -> float:
        """Requests to keep open now, as a mean over time: 1.5 is one and two in turn."""
        return self._state.limit.now

    @property
    def changes(self) -> ChangeLog:
        """Why the limit changed, counted by reason."""
        return self._state.limit.changes

    def admits(self, in_flight: int, now: float) -> bool:
        """Whether one more request goes out now; to be asked whenever that may have changed."""
        self._state.account(in_flight, now)
        limit = self.limit
        is_due = self._is_fraction_due(limit, now)
        return self._state.requests.admit(in_flight, limit, fraction_is_due=is_due)

    def answered(self, seconds: float, now: float) -> None:
        """Note an answer. Near the client's time-out the limit is cut at once."""
        self._state.answers.add(seconds, now)
        self._cuts.after_answer(seconds, now)

    def timed_out(self, now: float) -> None:
        """Note a request that was given up because of the time-out."""
        self._state.answers.note_timeout(now)
        self._cuts.after_timeout(now)

    def tick(self, in_flight: int, gauges: ServerGauges | None, now: float) -> None:
        """Note a sample, about once a second, and go on if a window ends."""
        state = self._state
        state.account(in_flight, now)
        state.samples.add(SearchSample(now, state.requests.used, gauges))
        state.note_gauges(are_shown=gauges is not None)
        self._note_idle_server(gauges)
        self._cuts.for_queue(now)
        if self._window is None:
            self._open_window(now)
        elif now >= self._window.ends:
            self._close_window(self._window, now)
            self._open_window(now)

    def share_with(self, processes: int, together: float | None = None) -> None:
        """Note the processes at work on the server, this one included, and all their limits."""
        self._fair_share.update(processes, together)

    def set_bound(self, bound: int) -> None:
        """Never let the limit be above `bound` from now on."""
        state = self._state
        if state.limit.set_bound(float(bound)):
            state.requests.note_move()

    def _is_fraction_due(self, limit: float, now: float) -> bool:
        """Whether it is the turn of the request that may be open only part of the time."""
        state = self._state
        if limit >= 1:
            return state.requests.owes_request(limit)
        # One after the other with a pause after each: the second of two in a row would wait.
        pause = (1 / limit - 1) * state.strategy.pause_after_answer(state.answers)
        return self._is_invited or now >= state.answers.last_end + pause

    def _note_idle_server(self, gauges: ServerGauges | None) -> None:
        """Invite a request at an idle server, at random so that not all paused processes send."""
        is_idle = gauges is not None and gauges.running + gauges.waiting == 0
        self._is_invited = is_idle and self._chance.random() < self._state.limit.base

    def _open_window(self, now: float) -> None:
        state = self._state
        seconds = 0.0
        if state.phase is Phase.STEADY:
            seconds = state.strategy.steps.answers_per_window * (state.answers.usual or 0.0)
        length = length_for(seconds, self._tuning)
        self._window = window_at(now, length, state.limit.trial, self._tuning)

    def _close_window(self, window: Window, now: float) -> None:
        if self._state.phase is Phase.DOUBLING:
            self._doubling.step(now)
        else:
            self._steady.step(window, now)
