"""What a probe of a server found at each number in flight, where it stops, what follows from it.

Pure. Used by probing.py, which measures, and by the command `probe`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile

from pydantic import BaseModel, ConfigDict

# Less growth than this over two doublings is none.
_GROWTH = 1.05
# One after the other: four at once bring no more than this times what one alone brings.
_SERIAL_AT, _SERIAL_GAIN = 4, 1.25
# A doubling that brings less than this shows that something is the limit, once so many were tried.
# Where the requests are seen to be held up outside the batch, more of a gain is still little.
_LEVEL, _LEVEL_HELD_UP, _LEVEL_STEPS = 1.15, 1.35, 3
# One core does all of the probe's work but the drawing of pages.
_BUSY = 0.8
# Twice as many can at worst take twice as long.
_WORST_STEP = 2.0
# The same throughput but for noise; and what `objective: latency` gives up for short answers.
_SAME, _NEARLY = 0.97, 0.9


class Ending(StrEnum):
    """Why a probe went no further."""

    SERIALISES = "serialises"
    NO_GROWTH = "no_growth"
    LATENCY = "latency"
    TIMEOUT = "timeout"
    ERROR = "error"
    MOST = "most"
    INTERRUPTED = "interrupted"


class Growth(StrEnum):
    """What the last doubling brought."""

    UNKNOWN = "unknown"
    GROWS = "grows"
    LEVEL = "level"


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far a probe goes.

    `seconds` and `answers`: what a step lasts at least. `latency`: seconds after which an answer
    is too slow. `timeout`: the client's own. `most`: requests in flight.
    """

    seconds: float = 10.0
    answers: int = 6
    latency: float = 120.0
    timeout: float = 1800.0
    most: int = 256


class Step(BaseModel):
    """Measured with so many in flight.

    `pages_per_second` and the latencies (seconds; their median, 95th percentile and greatest) are
    None where no answer could be counted. `open` is the mean of really open requests. Gauges are
    means, None without gauges; `full_at`: the most that ran while something waited. Tokens are
    means a page. `empty`: answers without a word. `client_cpu`: cores that the probe itself used.
    `too_slow`: ended because a request was open for longer than the bound.
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
        """Whether the probe may have been what held it up."""
        return self.client_cpu > _BUSY


class Choice(BaseModel):
    """A number in flight and what it brings."""

    model_config = ConfigDict(frozen=True)

    in_flight: int
    pages_per_second: float
    p95: float


class Findings(BaseModel):
    """What the steps say together.

    `batches` is None where too little was measured. `slots` is the server's own word where
    `slots_stated`, else the most that ran while something waited.
    """

    model_config = ConfigDict(frozen=True)

    ending: Ending
    batches: bool | None
    slots: int | None
    slots_stated: bool
    throughput: Choice
    latency: Choice


def next_in_flight(steps: Sequence[Step], bounds: Bounds, slots: int | None = None) -> int | Ending:
    """How many to try after these steps, or why to stop. `slots`: where the server says them."""
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
    """Whether pages are read one after the other; False while that is not certain.

    Two in flight settle it where the server states one slot, or shows one and brings no more;
    four where it shows one slot or brings no more.
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
    """Those of which an answer could be counted."""
    return [step for step in steps if step.pages_per_second is not None]


def growth(steps: Sequence[Step], *, held_up: bool) -> Growth:
    """What the last doubling brought, wherever the probe stopped.

    `held_up`: many requests were open that the server had not taken in.
    """
    speeds = [choice.pages_per_second for choice in _measured(steps)]
    level = _LEVEL_HELD_UP if held_up else _LEVEL
    if len(speeds) > 1 and speeds[-1] >= level * max(speeds[:-1]):
        return Growth.GROWS
    return Growth.LEVEL if len(speeds) >= _LEVEL_STEPS else Growth.UNKNOWN


def in_flight_with_cpu(steps: Sequence[Step]) -> int | None:
    """The most in flight up to which the probe kept up; None where it was short at once."""
    able = takewhile(lambda step: not step.lacked_cpu, steps)
    return max((step.in_flight for step in able), default=None)


def rests_on_lack_of_cpu(steps: Sequence[Step]) -> bool:
    """Whether the probe was short of CPU where throughput ended or was the most."""
    counted = with_throughput(steps)
    most = max(counted, key=lambda step: step.pages_per_second or 0.0)
    return counted[-1].lacked_cpu or most.lacked_cpu


def conclude(steps: Sequence[Step], ending: Ending, slots: int | None = None) -> Findings | None:
    """The findings; None where no step went well."""
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
    """Of the steps that went well to their end."""
    return [choice for step in steps if (choice := _choice(step)) is not None]


def _choice(step: Step) -> Choice | None:
    failed = step.too_slow or step.error is not None
    if failed or step.pages_per_second is None or step.p95 is None:
        return None
    return Choice(in_flight=step.in_flight, pages_per_second=step.pages_per_second, p95=step.p95)


def _least_with(measured: Sequence[Choice], share: float) -> Choice:
    """The fewest in flight that bring that share of the most."""
    wanted = share * max(choice.pages_per_second for choice in measured)
    return next(choice for choice in measured if choice.pages_per_second >= wanted)
