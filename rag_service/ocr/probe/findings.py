"""The steps of a probe, one for each number in flight: when it stops and what it found.

Pure functions; measurement.py measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile

from pydantic import BaseModel, ConfigDict

# The smallest growth of throughput over two doublings that counts.
_GROWTH = 1.05
# A server is serial if this number in flight gives at most this multiple of one alone.
_SERIAL_AT, _SERIAL_GAIN = 4, 1.25
# A doubling with a smaller gain shows a limit, from this number of steps on. If requests are held
# up outside the batch, a larger gain is still small.
_LEVEL, _LEVEL_HELD_UP, _LEVEL_STEPS = 1.15, 1.35, 3
# Cores; one core does all of the probe's work except drawing pages.
_BUSY = 0.8
# Twice the number in flight takes at most twice as long.
_WORST_STEP = 2.0
# The share of the best throughput that counts as the same, and the one that `objective: latency`
# accepts for shorter answers.
_SAME, _NEARLY = 0.97, 0.9


class Ending(StrEnum):
    """Why a probe stopped."""

    SERIALISES = "serialises"
    NO_GROWTH = "no_growth"
    LATENCY = "latency"
    TIMEOUT = "timeout"
    ERROR = "error"
    MOST = "most"
    INTERRUPTED = "interrupted"


class Growth(StrEnum):
    """Whether the last doubling raised the throughput."""

    UNKNOWN = "unknown"
    GROWS = "grows"
    LEVEL = "level"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of a probe.

    `seconds` and `answers`: the minimum of a step. `latency`: seconds after which an answer is too
    slow. `timeout`: the client's own, in seconds. `most`: requests in flight.
    """

    seconds: float = 10.0
    answers: int = 6
    latency: float = 120.0
    timeout: float = 1800.0
    most: int = 256


class Step(BaseModel):
    """One measurement with `in_flight` requests.

    `pages_per_second` and the latencies (seconds; median, 95th percentile and maximum) are None if
    no answer was counted. `open` is the mean number of open requests. Gauges are means, None
    without gauges; `full_at`: the most that ran while a request waited. Tokens are means per page.
    `empty`: answers without text. `client_cpu`: cores that the probe itself used. `too_slow`: a
    request was open for longer than the limit, which ended the step.
    """

    model_config = ConfigDict(frozen=True)

    in_flight: int
    answers: int
    pages_per_second: float | None = None
    median: float | None = None
    p95: float | None = None
    slowest: float | None = None
    open: float = 0.0
    running: float | None = None
    waiting: float | None = None
    cache_use: float | None = None
    full_at: int | None = None
    prompt_tokens: float | None = None
    completion_tokens: float | None = None
    empty: int = 0
    client_cpu: float = 0.0
    too_slow: bool = False
    error: str | None = None

    @property
    def lacked_cpu(self) -> bool:
        """Whether the probe itself may have been the limit."""
        return self.client_cpu > _BUSY


class Choice(BaseModel):
    """A number in flight with its throughput and latency (seconds)."""

    model_config = ConfigDict(frozen=True)

    in_flight: int
    pages_per_second: float
    p95: float


class Findings(BaseModel):
    """The result of all steps.

    `batches` is None if too little was measured. `slots`: as the server states them if
    `slots_stated`, else the most that ran while a request waited.
    """

    model_config = ConfigDict(frozen=True)

    ending: Ending
    batches: bool | None
    slots: int | None
    slots_stated: bool
    throughput: Choice
    latency: Choice


def next_in_flight(steps: Sequence[Step], bounds: Bounds, slots: int | None = None) -> int | Ending:
    """Return the next number in flight, or why to stop. `slots`: those that the server states."""
    if not steps:
        return 1
    last = steps[-1]
    if last.error is not None:
        return Ending.ERROR
    if last.pages_per_second is None or last.p95 is None or last.slowest is None:
        return Ending.LATENCY
    if last.too_slow or last.p95 > bounds.latency:
        return Ending.LATENCY
    if serialises(steps, slots):
        return Ending.SERIALISES
    before = [step.pages_per_second or 0.0 for step in steps[:-2]]
    if before and last.pages_per_second < _GROWTH * max(before):
        return Ending.NO_GROWTH
    if _WORST_STEP * last.slowest >= bounds.timeout:
        return Ending.TIMEOUT
    following = 2 * last.in_flight
    return Ending.MOST if following > bounds.most else following


def serialises(steps: Sequence[Step], slots: int | None = None) -> bool:
    """Return True if pages are certainly read one after the other.

    With two in flight, if the server states one slot, or shows one slot and no gain; with four, if
    it shows one slot or no gain.
    """
    tried = [step for step in with_throughput(steps) if step.in_flight > 1]
    alone = steps[0].pages_per_second if steps else None
    if alone is None or not tried:
        return False
    if slots is not None:
        return slots == 1
    most = max(step.pages_per_second or 0.0 for step in tried)
    able = not any(step.lacked_cpu for step in (steps[0], *tried))
    signs = (
        _slots(steps, slots) == 1,
        able and most < _SERIAL_GAIN * alone,
        tried[-1].in_flight >= _SERIAL_AT,
    )
    return sum(signs) >= 2


def with_throughput(steps: Sequence[Step]) -> list[Step]:
    """Return the steps with a counted answer."""
    return [step for step in steps if step.pages_per_second is not None]


def growth(steps: Sequence[Step], *, held_up: bool) -> Growth:
    """Return whether the last doubling raised the throughput, for any ending of the probe.

    `held_up`: many open requests neither ran nor waited in the server.
    """
    speeds = [choice.pages_per_second for choice in _measured(steps)]
    level = _LEVEL_HELD_UP if held_up else _LEVEL
    if len(speeds) > 1 and speeds[-1] >= level * max(speeds[:-1]):
        return Growth.GROWS
    return Growth.LEVEL if len(speeds) >= _LEVEL_STEPS else Growth.UNKNOWN


def in_flight_with_cpu(steps: Sequence[Step]) -> int | None:
    """Return the highest number in flight before the probe lacked CPU; None if it always did."""
    able = takewhile(lambda step: not step.lacked_cpu, steps)
    return max((step.in_flight for step in able), default=None)


def rests_on_lack_of_cpu(steps: Sequence[Step]) -> bool:
    """Return True if the probe lacked CPU at the last step or at the highest throughput."""
    counted = with_throughput(steps)
    most = max(counted, key=lambda step: step.pages_per_second or 0.0)
    return counted[-1].lacked_cpu or most.lacked_cpu


def conclude(steps: Sequence[Step], ending: Ending, slots: int | None = None) -> Findings | None:
    """Return the findings; None if no step succeeded."""
    measured = _measured(steps)
    if not measured:
        return None
    return Findings(
        ending=ending,
        batches=_batches(steps, measured, slots),
        slots=_slots(steps, slots),
        slots_stated=slots is not None,
        throughput=_least_with(measured, _SAME),
        latency=_least_with(measured, _NEARLY),
    )


def _batches(steps: Sequence[Step], measured: Sequence[Choice], slots: int | None) -> bool | None:
    if serialises(steps, slots):
        return False
    gain = max(choice.pages_per_second for choice in measured) / measured[0].pages_per_second
    return True if gain >= _SERIAL_GAIN else None


def _slots(steps: Sequence[Step], slots: int | None) -> int | None:
    if slots is not None:
        return slots
    return max((step.full_at for step in steps if step.full_at is not None), default=None)


def _measured(steps: Sequence[Step]) -> list[Choice]:
    """Return a choice for each step that succeeded."""
    return [choice for step in steps if (choice := _choice(step)) is not None]


def _choice(step: Step) -> Choice | None:
    failed = step.too_slow or step.error is not None
    if failed or step.pages_per_second is None or step.p95 is None:
        return None
    return Choice(in_flight=step.in_flight, pages_per_second=step.pages_per_second, p95=step.p95)


def _least_with(measured: Sequence[Choice], share: float) -> Choice:
    """Return the lowest number in flight with this share of the highest throughput."""
    wanted = share * max(choice.pages_per_second for choice in measured)
    return next(choice for choice in measured if choice.pages_per_second >= wanted)
