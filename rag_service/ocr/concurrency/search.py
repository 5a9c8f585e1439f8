"""How many requests one process keeps open to one OCR server: a search that never ends.

Pure: told what was sent, answered and seen, with the time of each. Used by limiter.py; driven by
the simulator too, whose clock it takes.

Every process searches by itself and all do it in step, because the wall clock tells them when:
time is cut into windows, the same for all, and in the same windows all try a little less or a
little more. So each sees what its step would bring if everybody made it, which is what counts,
without a word between them.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rag_service.ocr.concurrency.changes import ChangeLog
from rag_service.ocr.concurrency.trials import (
    BLIND,
    GAUGED,
    SearchSample,
    Signal,
    Steps,
    Trial,
    Trials,
    enough_waiting,
    gain_of,
    have_others_left,
    mean,
    mean_gain,
    mean_in_flight,
    tokens_a_second,
)
from rag_service.ocr.concurrency.windows import SHORTEST, Window, length_for, window_at
from rag_service.ocr.server_gauges import ServerGauges

LEAST, MOST = 0.1, 1024
_EXACT = 1e-9
# A window is at least this many times an answer's time.
_ANSWERS, _ANSWERS_BLIND = 2.0, 3.0
# So many requests together are no harm to a server that reads one at a time.
_BEGIN_TOGETHER = 8
# Fewer that come or go on one server change nothing.
_FEW_COME, _FEW_GO = 0.76, 1.32
# Answers of a window whose times are believed.
_TIMES_ENOUGH = 2
# Answers that take so many times the shortest wait in a queue somewhere; those of a doubling that
# take so many times are its last.
_QUEUED, _LATE = 2.2, 2.9
# The first part of a window still shows what was before it.
_SETTLING = 0.4
# Answers' times until a server has felt a doubling, and then until that has shown what it brings:
# more than one, since requests that went out together come back together.
_FELT, _FELT_BLIND, _SHOWN = 1.0, 2.0, 1.2
_WINDOWS_IN_CYCLE, _LESS_AT, _MORE_AT = 4, 0, 2
_KEPT_WINDOWS = 40
# No answer may come near the client's time-out: beyond this share of it less is sent.
_SAFE_SHARE = 0.4
# A server that shows no gauges and takes so long may read one page after the other: no more than
# one request of each process waits in it.
_BLIND_SECONDS = 120.0
_WAITING_SAMPLES = 5
_PATIENCE = 1.2
# A server that is found idle so often is not fed.
_IDLE_SHARE = 0.03
_LEAN_WAITING = 2.5
# The share of a step that must come back as throughput.
_WORTH, _WORTH_FEW, _PLENTY = 0.18, 0.35, 0.6
# So many tell of it even where the server shows no gauges.
_ANSWERS_TELL = 6
# So much less than it is worth is clear at the first look.
_CLEAR = 0.33
# The part of the difference to others that goes in one window; less of it stays.
_EVENING, _EVEN_ENOUGH = 0.3, 0.1


class Phase(StrEnum):
    """Where the search is."""

    DOUBLING = "doubling"
    STEADY = "steady"


@dataclass(frozen=True, slots=True)
class Aim:
    """What the search is for.

    `yielded`: the share of throughput given up for shorter answers. `share`: of what the search
    finds, how much is used. `timeout`: seconds after which a request is given up.
    """

    yielded: float = 0.0
    share: float = 1.0
    timeout: float = 1800.0


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
    ) -> None:
        """`start`: what was right before, for each of `among` processes; it may double still."""
        self._aim = aim
        self.changes = ChangeLog()
        self._may_grow = may_grow
        self.phase = Phase.DOUBLING
        self._base = start or 1.0
        self._limit = self._base
        self._answer_seconds: float | None = None
        self._least_seconds = math.inf
        self._open = 0
        self._last_end = -math.inf
        self._last_seconds = 0.0
        self._used = self._owed = 0.0
        self._accounted_at: float | None = None
        self._moved_at = math.inf
        self._latencies: deque[tuple[float, float]] = deque(maxlen=500)
        self._samples: deque[SearchSample] = deque(maxlen=4096)
        self._window: Window | None = None
        self._doubled_from: Trial | None = None
        self._lost = (0.0, 0.0)
        self._doubted = False
        self._trials = Trials()
        self._began_known = start is not None
        self._sharing = among
        self._beside = among or 0
        self._even: float | None = None
        self._is_cold = self._is_first = start is None
        self._no_cut_before = -math.inf
        self._gauged = self._is_invited = False
        self._chance = chance or random.Random()

    @property
    def is_settled(self) -> bool:
        """Whether the usual number was found to be right."""
        return self.phase is Phase.STEADY

    @property
    def usual(self) -> float:
        """The limit, but for a trial that may be under way."""
        return max(LEAST, self._base * self._aim.share)

    @property
    def limit(self) -> float:
        """Requests to keep open now, as a mean over time: 1.5 is one and two by turns."""
        return self._limit if self._limit != self._base else self.usual

    def admits(self, in_flight: int, now: float) -> bool:
        """Whether one more request goes out now; asked whenever that may have changed."""
        self._account(in_flight, now)
        whole = math.floor(self.limit + _EXACT)
        admitted = in_flight < whole or (in_flight == whole and self._admits_part(now))
        self._open += admitted
        return admitted

    def _admits_part(self, now: float) -> bool:
        """Whether it is the turn of the place that is there only a part of the time."""
        part = self.limit % 1
        if self.limit >= 1:
            return _EXACT < part < 1 - _EXACT and self._owed >= 0
        # One after the other, with a rest after each: of two in a row the second would wait.
        known = self._answer_seconds or 0.0
        usual = known if self._gauged else min(known, self._last_seconds)
        return self._is_invited or now >= self._last_end + (1 / self.limit - 1) * usual

    def answered(self, seconds: float, now: float) -> None:
        """A request took so long. Near the client's time-out less is sent at once."""
        self._last_end, self._last_seconds = now, seconds
        self._latencies.append((now, seconds))
        known = self._answer_seconds
        self._answer_seconds = seconds if known is None else 0.85 * known + 0.15 * seconds
        late = seconds > self._safe_seconds(1.0)
        if late and not self._is_safe(1.0) and now >= self._no_cut_before:
            self._cut(0.7, now + 0.6 * self._answer_seconds)

    def timed_out(self, now: float) -> None:
        """A request was given up for its time."""
        self._last_end = now
        self._cut(0.5, now + 10.0)

    def tick(self, in_flight: int, gauges: ServerGauges | None, now: float) -> None:
        """About once a second: what is open, and what the server says of itself."""
        self._account(in_flight, now)
        self._samples.append(SearchSample(now, self._used, gauges))
        self._gauged = gauges is not None
        # So that of many that rest while the server does nothing about as many go as are wanted.
        is_idle = gauges is not None and gauges.running + gauges.waiting == 0
        self._is_invited = is_idle and self._chance.random() < self._base
        self._shed_waiting(now)
        if self._window is None:
            self._open_window(now)
        elif now >= self._window.ends:
            self._close_window(self._window, now)
            self._open_window(now)

    def share_with(self, processes: int, together: float | None = None) -> None:
        """So many are at work on the server, this one included; `together`: all their usuals.

        What is right for the server stays, whoever sends it: the others' part is taken when they
        have run out of pages, and given back when they return. Told twice that others are gone:
        of those that begin beside each other the first are not told of the last.
        """
        is_known = together is not None and processes == self._beside
        self._even = together / processes / self._aim.share if together and is_known else None
        self._beside, processes = processes, max(processes, self._beside)
        before, is_first = self._sharing or processes, self._sharing is None
        self._begin_together(processes, is_first=is_first)
        if not is_first and _FEW_COME < processes / before < _FEW_GO:
            return
        self._sharing = processes
        # A search from nothing begins beside others that do the same: it took nobody's part.
        if processes < before or self.phase is Phase.STEADY or self._began_known:
            self._move_to(self._base * before / processes)
            self._trials.clear()
            self._doubled_from = None

    def _begin_together(self, processes: int, *, is_first: bool) -> None:
        """Few at work on a server that nobody knows begin with as many as eight would."""
        if self._is_cold and not is_first:
            self._is_cold = False
            if self.phase is Phase.DOUBLING and self._base < _BEGIN_TOGETHER / processes:
                self._move_to(_BEGIN_TOGETHER / processes)
                self._doubled_from = None

    @property
    def _steps(self) -> Steps:
        return GAUGED if self._gauged else BLIND

    def _account(self, in_flight: int, now: float) -> None:
        """What was open since the last time; what is owed of a limit that is no whole number."""
        passed = 0.0 if self._accounted_at is None else max(0.0, now - self._accounted_at)
        most = self._answer_seconds or 0.0
        owed = self._owed + (self.limit - self._open) * passed
        # Time without enough to send must not be made up for by many at once.
        self._owed = min(most, owed)
        self._used += self._open * passed
        self._moved_at = min(self._moved_at, now)
        self._accounted_at, self._open = now, in_flight

    def _is_safe(self, factor: float) -> bool:
        """Whether answers that took so much longer would stay far from the time-out."""
        known = self._answer_seconds
        return known is None or known * factor <= self._safe_seconds(factor)

    def _safe_seconds(self, factor: float) -> float:
        """What an answer may take of a limit that is so many times the usual one."""
        safe = _SAFE_SHARE * self._aim.timeout
        alone = self._base * factor <= 1
        return safe if self._gauged or alone else min(safe, _BLIND_SECONDS)

    def _cut(self, factor: float, until: float) -> None:
        self._no_cut_before = until
        self._settle(self._base * factor)

    def _settle(self, base: float) -> None:
        """Go on from here; what was measured before says nothing of it."""
        self.phase = Phase.STEADY
        self._move_to(base)
        self._trials.clear()

    def _move_to(self, base: float) -> None:
        self._base = min(MOST, max(LEAST, base))
        self._limit = self._base
        self._moved_at = math.inf if self._accounted_at is None else self._accounted_at

    def _shed_waiting(self, now: float) -> None:
        """More than a few wait in the server: send so much less that these few remain."""
        last = [s.gauges for s in list(self._samples)[-_WAITING_SAMPLES:] if s.gauges]
        if len(last) < _WAITING_SAMPLES or now < self._no_cut_before:
            return
        running, waiting = mean(g.running for g in last), mean(g.waiting for g in last)
        allowed = enough_waiting(running)
        # What a trial sends beyond what was right may wait until the trial is over.
        tried = max(0.0, 1 - self._base / self._limit) * (running + waiting)
        if waiting <= 2 * allowed + tried:
            return
        keep = (running + allowed) / (running + waiting)
        self._cut(max(0.5, keep), now + max(6.0, self._drained_in()))

    def _drained_in(self) -> float:
        """Seconds until what waits in the server shows that less is sent."""
        return _PATIENCE * (self._answer_seconds or SHORTEST)

    def _open_window(self, now: float) -> None:
        answers = _ANSWERS if self._gauged else _ANSWERS_BLIND
        is_quick = self.phase is Phase.DOUBLING
        length = length_for(0.0 if is_quick else answers * (self._answer_seconds or 0.0))
        self._window = window_at(now, length, self._limit)

    def _close_window(self, window: Window, now: float) -> None:
        if self.phase is Phase.DOUBLING:
            self._look_at_doubling(now)
            return
        since = window.began + _SETTLING * (now - window.began)
        measured = self._measured(window.limit, since, now)
        if measured is not None:
            self._judge(measured, window)
            self._try_next(measured, window, now)

    def _measured(self, limit: float, since: float, now: float) -> Trial | None:
        """The throughput; None where the limit was not kept or used up, or nothing was seen."""
        samples = [s for s in self._samples if s.at > since]
        if len(samples) < 2 or self._limit != limit:
            return None
        in_flight = mean_in_flight(samples)
        if in_flight < 0.7 * self.limit * self._busy_share():
            return None
        seconds = self._answers_since(since)
        times = self._by_times(in_flight, seconds)
        tokens = tokens_a_second(samples, mean(seconds) if seconds else self._answer_seconds)
        if times is None and tokens is None:
            return None
        seen = [s.gauges for s in samples if s.gauges]
        if not seen:
            return Trial(now, limit, times, tokens, len(seconds))
        idle = mean(g.running == 0 for g in seen)
        running, waiting = mean(g.running for g in seen), mean(g.waiting for g in seen)
        return Trial(now, limit, times, tokens, len(seconds), idle, running, waiting)

    def _busy_share(self) -> float:
        """Below one the limit itself is the share of time that something is open."""
        return 1.0 if self.limit >= 1 else 0.5

    def _answers_since(self, since: float) -> list[float]:
        """How long each took; while the search doubles, of those sent at this limit."""
        sent = self._moved_at if self.phase is Phase.DOUBLING else -math.inf
        return [took for at, took in self._latencies if at > since and at - took >= sent]

    def _by_times(self, in_flight: float, seconds: Sequence[float]) -> float | None:
        if len(seconds) < (_TIMES_ENOUGH if self._gauged else 1):
            return None
        usual = mean(seconds)
        # A server that has become slower must not look queued for ever.
        self._least_seconds = min(self._least_seconds * 1.01, usual)
        return in_flight / usual

    def _look_at_doubling(self, now: float) -> None:
        """Go on once the server has shown what this limit brings."""
        if self._may_double_unseen():
            self._is_first = False
            self._move_to(2 * self._base)
            return
        seconds = self._answers_since(self._moved_at)
        # The first in a server's queue does not know of those behind it.
        if not seconds or (not self._gauged and len(self._latencies) < _TIMES_ENOUGH):
            return
        usual = mean(seconds)
        felt = _FELT if self._gauged else _FELT_BLIND
        # Not quite, since windows end a beat late.
        if now - self._moved_at < 0.9 * length_for((felt + _SHOWN) * usual):
            return
        felt_at = self._moved_at + felt * usual
        measured = self._measured(self._limit, felt_at, now)
        if measured is not None:
            self._double(measured)

    def _may_double_unseen(self) -> bool:
        """Whether a cold server may have twice the first few at once: it shows that it batches.

        All processes see it at the same time, whosever the first answers are.
        """
        gauges = self._samples[-1].gauges
        if not self._is_first or gauges is None or gauges.running < 2 or gauges.waiting >= 1:
            return False
        return self._base * self._beside <= _BEGIN_TOGETHER and self._may_add(2.0)

    def _double(self, measured: Trial) -> None:
        """Twice as many for as long as that is worth it."""
        before, self._doubled_from, self._is_first = self._doubled_from, measured, False
        if before is not None and measured.limit > before.limit:
            gain = None if have_others_left(before, measured) else mean_gain(before, measured)
            if gain is not None and gain < self._worth(before, measured):
                self._doubted = not self._doubted
                if self._doubted:
                    self._doubled_from = before
                else:
                    self._settle(before.limit * 1.2)
                return
        self._doubted = False
        # Where answers wait already, who doubles alone sees what it takes from the others.
        if not measured.is_crowded and not self._waits(measured) and self._may_add(2.0):
            self._move_to(2 * self._base)
        else:
            self._settle(self._base)

    def _worth(self, before: Trial, after: Trial) -> float:
        """The share of a doubling that must come back; more where few answers tell of it."""
        told = min(before.answers, after.answers) >= _ANSWERS_TELL
        return _WORTH if self._gauged or told else _WORTH_FEW

    def _judge(self, measured: Trial, window: Window) -> None:
        """Keep what a trial brought where it was worth it."""
        self._trials.remember(measured, _KEPT_WINDOWS * window.length)
        if measured.idle > _IDLE_SHARE and measured.limit <= self._base and self._may_add():
            self._base *= 1.3
            return
        signal = self._trials.steadier(self._base) if self._gauged else Signal.TIMES
        seen, reference = signal.of(measured), self._trials.reference(signal, self._base)
        if seen is None or reference is None:
            return
        best, noise = self._trials.best(signal), self._noise(signal)
        yielded = self._aim.yielded
        if measured.limit == self._base:
            lacking = reference < best * (1 - 2 * noise - yielded)
            if lacking and self._may_add() and not self._is_queued():
                self._base *= 1.12
        elif measured.limit > self._base:
            # Of what only waits, a process that sends more gets more, at the others' cost: there
            # only the whole server's tokens tell.
            trusted = Signal.TOKENS if self._is_queued() else signal
            if self._gains(measured, trusted, noise, yielded):
                self._base = max(self._base, measured.limit * measured.useful_share)
                self._double_again(measured)
        elif seen > best * (1 - noise - yielded) and self._is_spare(measured, seen, reference):
            self._base = measured.limit

    def _is_spare(self, measured: Trial, seen: float, reference: float) -> bool:
        """Whether what a trial did without brings less than it is worth; in doubt two say so."""
        allowed = _WORTH * (1 - measured.limit / self._base) + self._aim.yielded
        lost = 1 - seen / reference
        before, self._lost = self._lost, (self._base, lost)
        if lost < _CLEAR * allowed and (self._gauged or measured.answers >= _ANSWERS_TELL):
            return True
        return before[0] == self._base and (lost + before[1]) / 2 < allowed

    def _double_again(self, measured: Trial) -> None:
        """What came back as throughput by more than half shows how little the server has to do."""
        before = self._trials.before_last
        if before.limit < measured.limit and (gain_of(before, measured) or 0.0) > _PLENTY:
            self.phase, self._doubled_from = Phase.DOUBLING, measured
            self._move_to(self._base)

    def _gains(self, measured: Trial, signal: Signal, noise: float, yielded: float) -> bool:
        seen, reference = signal.of(measured), self._trials.reference(signal, self._base)
        worth = max(1.5 * noise, _WORTH * self._step_of(measured)) + yielded / 4
        return seen is not None and reference is not None and seen > reference * (1 + worth)

    def _step_of(self, measured: Trial) -> float:
        """How much more the server worked on; all slots taken, what else was sent only waited."""
        step = measured.limit / self._base - 1
        before = [t.running for t in self._trials.alike(self._base) if t.running]
        if not before or measured.running is None:
            return step
        return min(step, max(0.0, measured.running / before[-1] - 1))

    def _waits(self, measured: Trial) -> bool:
        """Whether the window's answers took far longer than answers once did."""
        if not measured.by_times:
            return False
        return measured.limit / measured.by_times > _LATE * self._least_seconds

    def _is_queued(self) -> bool:
        """Whether answers take far longer than they once did."""
        known = self._answer_seconds
        return known is not None and known > _QUEUED * self._least_seconds

    def _noise(self, signal: Signal) -> float:
        """A difference that means nothing."""
        return min(0.1, max(self._steps.noise, self._trials.wavering(signal, self._base) or 0.0))

    def _may_add(self, factor: float = 1.15) -> bool:
        return self._is_safe(factor) and self._may_grow()

    def _try_next(self, measured: Trial, window: Window, now: float) -> None:
        """In some windows of each cycle, the same for everybody, a little less or more."""
        self._limit = self._base
        self._even_out()
        if window.limit > self._limit:
            self._no_cut_before = max(self._no_cut_before, now + self._drained_in())
        if not self._trials.alike(self._base):
            return
        place = int(now / window.length) % _WINDOWS_IN_CYCLE
        if place == _LESS_AT and not self._is_lean(measured):
            self._limit = max(LEAST, self._base * self._steps.less)
        elif place == _MORE_AT and not measured.is_crowded and self._may_add(self._steps.more):
            self._limit = min(MOST, self._base * self._steps.more)

    def _even_out(self) -> None:
        """A step towards what each has on average: parts drift apart, and none is worth more."""
        if self._even is not None and abs(self._even / self._base - 1) > _EVEN_ENOUGH:
            self._move_to(self._base + _EVENING * (self._even - self._base))

    def _is_lean(self, measured: Trial) -> bool:
        """Of a server that works on few at once: hardly any wait, so with less it would idle."""
        few = self._base < 1 and measured.waiting is not None
        return few and (measured.waiting or 0.0) < _LEAN_WAITING
