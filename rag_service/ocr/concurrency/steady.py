"""The second phase of the search, without end: try a little less and a little more."""

from __future__ import annotations

from rag_service.ocr.concurrency.changes import ChangeReason
from rag_service.ocr.concurrency.cuts import Cuts
from rag_service.ocr.concurrency.fair_share import FairShare
from rag_service.ocr.concurrency.search_state import Phase, SearchState
from rag_service.ocr.concurrency.trials import Signal, Trial, gain_of
from rag_service.ocr.concurrency.windows import Window


class SteadyPhase:
    """Judges the trial of each window and begins the next, in step with all other processes."""

    def __init__(self, state: SearchState, cuts: Cuts, fair_share: FairShare) -> None:
        self._state = state
        self._cuts = cuts
        self._fair_share = fair_share
        # The limit that a trial of less was compared with, and the share of throughput it lost.
        self._lost = (0.0, 0.0)

    def step(self, window: Window, now: float) -> None:
        """Judge the window that ends now, unless it showed nothing, and begin the next trial."""
        since = window.began + self._state.tuning.settling * (now - window.began)
        measured = self._state.measure(window.limit, since, now)
        if measured is not None:
            self._judge(measured, window)
            self._begin_trial(measured, window, now)

    def _judge(self, measured: Trial, window: Window) -> None:
        """Keep what a trial brought if it was worth it."""
        state, tuning, base = self._state, self._state.tuning, self._state.limit.base
        state.trials.add(measured, tuning.kept_windows * window.length)
        is_idle = measured.idle > tuning.idle_share and measured.limit <= base
        if is_idle and state.may_add(tuning.usual_growth):
            state.limit.keep(base * tuning.more_if_idle, ChangeReason.SERVER_IDLE)
            return
        signal = state.strategy.signal(state.trials, base)
        seen, usual = signal.of(measured), state.trials.throughput_at(signal, base)
        if seen is None or usual is None:
            return
        best = state.trials.best(signal)
        if measured.limit == base:
            self._judge_usual(signal, usual, best)
        elif measured.limit > base:
            self._judge_more(measured, signal)
        elif seen > best * (1 - self._noise(signal) - state.aim.yielded):
            self._judge_less(measured, seen, usual)

    def _judge_usual(self, signal: Signal, usual: float, best: float) -> None:
        """Grow if the usual limit brings less than others did lately."""
        state, tuning = self._state, self._state.tuning
        lacking = 1 - tuning.noises_below_best * self._noise(signal) - state.aim.yielded
        is_below = usual < best * lacking
        if is_below and state.may_add(tuning.usual_growth) and not state.answers.are_queued():
            state.limit.keep(state.limit.base * tuning.more_if_below_best, ChangeReason.BELOW_BEST)

    def _judge_more(self, measured: Trial, signal: Signal) -> None:
        """Keep more if it gained throughput.

        When requests only wait, a process that sends more gets more at the others' cost: then
        only the whole server's tokens count.
        """
        state = self._state
        noise = self._noise(signal)
        trusted = Signal.TOKENS if state.answers.are_queued() else signal
        if self._gains(measured, trusted, noise):
            useful = measured.limit * measured.useful_share(state.tuning)
            state.limit.keep(max(state.limit.base, useful), ChangeReason.MORE_GAINED)
            self._double_again(measured)

    def _judge_less(self, measured: Trial, seen: float, usual: float) -> None:
        """Keep less if the throughput it costs is worth less; in doubt two windows must show it."""
        state, tuning, base = self._state, self._state.tuning, self._state.limit.base
        allowed = tuning.worth * (1 - measured.limit / base) + state.aim.yielded
        lost = 1 - seen / usual
        before, self._lost = self._lost, (base, lost)
        is_clear = lost < tuning.clear_loss * allowed and state.strategy.trusts(measured)
        if is_clear or (before[0] == base and (lost + before[1]) / 2 < allowed):
            state.limit.keep(measured.limit, ChangeReason.LESS_COST_NOTHING)

    def _double_again(self, measured: Trial) -> None:
        """Go back to doubling if most of the step came back: the server has little to do."""
        state, before = self._state, self._state.trials.before_last
        if before.limit < measured.limit and (gain_of(before, measured) or 0.0) > (
            state.tuning.plenty
        ):
            state.phase, state.doubled_from = Phase.DOUBLING, measured
            state.move_to(state.limit.base, ChangeReason.DOUBLING_RESUMED)

    def _gains(self, measured: Trial, signal: Signal, noise: float) -> bool:
        state, tuning = self._state, self._state.tuning
        seen = signal.of(measured)
        usual = state.trials.throughput_at(signal, state.limit.base)
        step = max(tuning.noises_above_usual * noise, tuning.worth * self._useful_step(measured))
        worth = step + state.aim.yielded * tuning.yielded_part
        return seen is not None and usual is not None and seen > usual * (1 + worth)

    def _useful_step(self, measured: Trial) -> float:
        """Return by how much more the server worked on; if all slots are taken, the rest waits."""
        base = self._state.limit.base
        step = measured.limit / base - 1
        before = [t.running for t in self._state.trials.at_limit(base) if t.running]
        if not before or measured.running is None:
            return step
        return min(step, max(0.0, measured.running / before[-1] - 1))

    def _noise(self, signal: Signal) -> float:
        """Return the relative difference of throughput that means nothing."""
        state = self._state
        varies = state.trials.variation(signal, state.limit.base) or 0.0
        return min(state.tuning.most_noise, max(state.strategy.steps.noise, varies))

    def _begin_trial(self, measured: Trial, window: Window, now: float) -> None:
        """In two windows of each cycle, the same for all processes, try less or more."""
        state, tuning = self._state, self._state.tuning
        state.limit.end_trial()
        self._fair_share.even_out()
        if window.limit > state.limit.base:
            self._cuts.wait_for_trial(now)
        if not state.trials.at_limit(state.limit.base):
            return
        place, steps = int(now / window.length) % tuning.windows_per_cycle, state.strategy.steps
        if place == tuning.less_at and not self._is_lean(measured):
            state.limit.try_less(steps.less)
        elif place == tuning.more_at and self._may_try_more(measured, steps.more):
            state.limit.try_more(steps.more)

    def _may_try_more(self, measured: Trial, factor: float) -> bool:
        return not measured.is_crowded(self._state.tuning) and self._state.may_add(factor)

    def _is_lean(self, measured: Trial) -> bool:
        """Whether hardly any request waits in a server of few slots: with less it would idle."""
        is_few = self._state.limit.base < 1 and measured.waiting is not None
        return is_few and (measured.waiting or 0.0) < self._state.tuning.lean_waiting
