"""How full an OCR server is, and who is the bottleneck. Used by maintenance, API, CLI, the probe.

Nothing here asks anybody: samples come in, a verdict in words comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from rag_service.runtime.plural import counted

# A server that runs this share of its slots is full: requests come and go.
_FULL = 0.9
_HALF = 0.5
_FREE_SLOT = 0.4
# Figures from here on are told as whole numbers.
_PLAIN = 9.5
# On average: now and then one waits.
_SOME_WAIT = 0.5
# Waiting beyond both adds latency and nothing else.
_MANY_WAIT = 4.0
_MANY_SHARE = 0.5
_CACHE_FULL = 0.9
# Of ours in flight so many for each one that the server has taken in: the others are in its
# front end. Few in flight need a clearer sign.
_CROWD = 1.4
_CLEAR_CROWD = 3.0
_LEAST_CROWD = 4.0
# Our forks use their places when this share of them is taken: samples are moments.
_TAKEN = 0.6
# A limit that moved by this factor is still being looked for.
_MOVES = 1.5
# A search without gauges that ends here has found that a second request only waits.
_SERIAL = 2.0


class Verdict(StrEnum):
    """What keeps a server from reading more pages."""

    UNKNOWN = "unknown"
    IDLE = "idle"
    STARVED = "starved"
    FRONT_END_BOUND = "front_end_bound"
    KV_BOUND = "kv_bound"
    SATURATED = "saturated"
    OVERLOADED = "overloaded"
    SERIALISING = "serialising"


@dataclass(frozen=True, slots=True)
class LoadSample:
    """A server at one moment.

    `running`, `waiting`, `cache_use` (0 to 1) and `tokens_per_second` are its own gauges, None
    where it shows none. `in_flight`: our open requests; `limit`: how many our forks would let be
    open, None where none is at work; `pages_waiting`: pages for it that were not sent yet.
    """

    url: str
    at: datetime
    running: float | None
    waiting: float | None
    slots: int | None
    cache_use: float | None
    in_flight: float
    limit: float | None
    tokens_per_second: float | None
    pages_per_minute: float
    pages_waiting: int


@dataclass(frozen=True, slots=True)
class Feed:
    """How pages get to the server.

    `adaptive`: forks look for the right number in flight; `remote`: in jobs, and the gauges are
    means of jobs that ended; `low_memory`: the memory guard lets nothing new begin.
    """

    adaptive: bool = True
    remote: bool = False
    low_memory: bool = False


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The verdict, and a sentence that says why and what to do."""

    verdict: Verdict
    sentence: str


def diagnose(samples: Sequence[LoadSample], feed: Feed | None = None) -> Diagnosis:
    """What the samples of the last minute say; `starved` only where pages waited in each."""
    if not samples:
        return Diagnosis(Verdict.UNKNOWN, "Nothing is known of it yet.")
    seen = _Seen.of(samples, feed or Feed())
    for rule in _RULES:
        found = rule(seen)
        if found is not None:
            return found
    return _of_the_client(seen)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Means over the samples; `backlog`: the fewest pages that waited in any of them.

    Of the last one are `in_flight_now` and `pages_waiting`.
    """

    feed: Feed
    gauged: bool
    running: float
    waiting: float
    most_running: float
    slots: int | None
    cache_use: float
    in_flight: float
    in_flight_now: float
    limit: float | None
    limit_moves: bool
    backlog: int
    pages_waiting: int
    # The last look found nothing at all; before it the server may have worked.
    is_over: bool

    @classmethod
    def of(cls, samples: Sequence[LoadSample], feed: Feed) -> _Seen:
        running = [s.running for s in samples if s.running is not None]
        last = samples[-1]
        # Between two documents a fork has nothing for a moment; twice in a row none is at work.
        at_work = any(s.limit for s in samples[-2:])
        limits = [s.limit for s in samples if s.limit and at_work]
        return cls(
            feed=feed,
            gauged=bool(running),
            running=_mean(running),
            waiting=_mean(s.waiting for s in samples if s.waiting is not None),
            most_running=max(running, default=0.0),
            slots=next((s.slots for s in reversed(samples) if s.slots), None),
            cache_use=_mean(s.cache_use for s in samples if s.cache_use is not None),
            in_flight=_mean(s.in_flight for s in samples),
            in_flight_now=last.in_flight,
            limit=_mean(limits) if limits else None,
            limit_moves=bool(limits) and max(limits) > _MOVES * min(limits),
            backlog=min(s.pages_waiting for s in samples),
            pages_waiting=last.pages_waiting,
            is_over=not (last.running or last.waiting or last.in_flight or last.pages_waiting),
        )

    @property
    def runs(self) -> str:
        of_slots = f" on {counted(self.slots, 'slot')}" if self.slots else ""
        running, waiting = _figure(self.running), _figure(self.waiting)
        return f"on average {running} run{of_slots} and {waiting} wait"

    def fills(self, share: float) -> bool:
        """Whether that share of the slots is in use; never where they are not known.

        Nor may more than a part of one be free: of one slot a look sees all or nothing.
        """
        if self.slots is None:
            return False
        return self.running >= min(share * self.slots, self.slots - _FREE_SLOT)


def _idle(seen: _Seen) -> Diagnosis | None:
    works = seen.pages_waiting or seen.in_flight >= _SOME_WAIT or seen.running >= _SOME_WAIT
    if works and not seen.is_over:
        return None
    return Diagnosis(Verdict.IDLE, "Nothing waits for it.")


def _without_gauges(seen: _Seen) -> Diagnosis | None:
    if seen.gauged or not seen.feed.remote:
        return None
    return Diagnosis(Verdict.UNKNOWN, "No job has brought gauges back lately.")


def _serialising(seen: _Seen) -> Diagnosis | None:
    one = seen.most_running <= 1 and seen.slots in (None, 1)
    if not seen.gauged or not one or seen.waiting < _SOME_WAIT:
        return None
    return Diagnosis(
        Verdict.SERIALISING,
        f"It works on one request at a time while {seen.waiting:.1f} wait; one waiting is "
        "enough. For more pages let the server batch (vLLM: --max-num-seqs, SGLang: "
        "--max-running-requests), or take one that does.",
    )


def _overloaded(seen: _Seen) -> Diagnosis | None:
    if seen.waiting <= max(_MANY_WAIT, _MANY_SHARE * seen.running):
        return None
    whose = (
        "`auto` sends fewer soon, unless they are another client's"
        if seen.feed.adaptive
        else "set GLMOCR_PIPELINE_MAX_WORKERS to `auto`, or lower"
    )
    return Diagnosis(
        Verdict.OVERLOADED,
        f"More in flight only makes every answer later: {seen.runs}; {whose}.",
    )


def _kv_bound(seen: _Seen) -> Diagnosis | None:
    if seen.cache_use < _CACHE_FULL or seen.fills(_FULL):
        return None
    return Diagnosis(
        Verdict.KV_BOUND,
        f"Its KV cache is {seen.cache_use:.0%} full, so no more fit: {seen.runs}. Give the "
        "server more memory (vLLM: --gpu-memory-utilization, SGLang: --mem-fraction-static), "
        "or send smaller pictures (ocr.dpi).",
    )


def _saturated(seen: _Seen) -> Diagnosis | None:
    if seen.waiting < _SOME_WAIT and not seen.fills(_FULL):
        return None
    return Diagnosis(
        Verdict.SATURATED,
        f"It has all it can do: {seen.runs}. For more pages take smaller pictures "
        "(ocr.dpi) or another server.",
    )


def _front_end_bound(seen: _Seen) -> Diagnosis | None:
    # Of forks that died a moment ago the mean still tells.
    in_flight = min(seen.in_flight, seen.in_flight_now)
    if not seen.gauged or seen.feed.remote or in_flight < _LEAST_CROWD:
        return None
    tried = seen.feed.adaptive or bool(seen.slots and seen.in_flight >= _HALF * seen.slots)
    crowd = _CROWD if tried else _CLEAR_CROWD
    if in_flight <= crowd * (seen.running + seen.waiting):
        return None
    return Diagnosis(
        Verdict.FRONT_END_BOUND,
        f"We have {_figure(in_flight)} in flight, but {seen.runs} in it: its front end, which "
        "decodes the pictures, is the limit. Start the server with more API processes (vLLM: "
        "--api-server-count), or send smaller pictures (ocr.dpi).",
    )


def _nothing_more(seen: _Seen) -> Diagnosis | None:
    if seen.backlog:
        return None
    if seen.pages_waiting:
        return Diagnosis(
            Verdict.UNKNOWN,
            f"{_waits(seen.pages_waiting)}, but none did a moment ago: too early to tell.",
        )
    if seen.in_flight < _SOME_WAIT:
        return Diagnosis(Verdict.IDLE, "No page of ours waits; what runs is another client's.")
    return Diagnosis(Verdict.IDLE, "The last pages are under way; no more wait for it.")


def _of_jobs(seen: _Seen) -> Diagnosis | None:
    if not seen.feed.remote:
        return None
    if seen.slots is None:
        return Diagnosis(
            Verdict.UNKNOWN,
            f"In its jobs, {seen.runs}; set occupancy.slots to the requests that it can batch.",
        )
    if seen.fills(_HALF):
        return Diagnosis(Verdict.SATURATED, f"Its jobs keep it busy: {seen.runs}.")
    return Diagnosis(
        Verdict.STARVED,
        f"{_waits(seen.pages_waiting)}, and in its jobs {seen.runs}: jobs carry too few pages. "
        "Raise runpod.max_pages_per_job.",
    )


# The first that has something to say; then it is the client.
_RULES: tuple[Callable[[_Seen], Diagnosis | None], ...] = (
    _idle,
    _without_gauges,
    _serialising,
    _overloaded,
    _kv_bound,
    _saturated,
    _front_end_bound,
    _nothing_more,
    _of_jobs,
)


def _of_the_client(seen: _Seen) -> Diagnosis:
    """Pages wait and the server could take more, or does not say that it is full."""
    taken = seen.limit is not None and seen.in_flight >= _TAKEN * seen.limit
    if taken and seen.feed.adaptive:
        return _as_found(seen)
    if taken and not seen.gauged:
        return Diagnosis(
            Verdict.UNKNOWN,
            f"All {_figure(seen.limit or 0)} places that the settings allow are taken, and the "
            "server shows no gauges. GLMOCR_PIPELINE_MAX_WORKERS=auto finds the right number.",
        )
    state = f" ({seen.runs})" if seen.gauged else ""
    return Diagnosis(
        Verdict.STARVED, f"{_waits(seen.pages_waiting)}, but {_cause(seen, taken)}{state}."
    )


def _as_found(seen: _Seen) -> Diagnosis:
    """Our forks use every place that their search allows."""
    if seen.limit_moves:
        return Diagnosis(
            Verdict.UNKNOWN,
            f"The right number in flight is being looked for; now {_figure(seen.in_flight_now)}.",
        )
    if not seen.gauged and seen.in_flight <= _SERIAL:
        return Diagnosis(
            Verdict.SERIALISING,
            "As far as its answers show it reads one page after another; more in flight only "
            "wait. For more pages take a server that batches.",
        )
    said = f": {seen.runs}" if seen.gauged else ""
    return Diagnosis(
        Verdict.SATURATED,
        f"More than {_figure(seen.in_flight)} in flight bring no more pages{said}. For more pages "
        "take smaller pictures (ocr.dpi) or another server.",
    )


def _cause(seen: _Seen, taken: bool) -> str:
    if seen.feed.low_memory:
        return (
            "this machine has too little memory available, so the memory guard lets nothing new "
            "begin: free some, or lower memory_guard.min_available_mib"
        )
    if seen.limit is None:
        return "no fork sends any: look at the ocr workers"
    if taken:
        return (
            f"the settings allow {_figure(seen.limit)} in flight: set "
            "GLMOCR_PIPELINE_MAX_WORKERS to `auto`"
        )
    return (
        f"our workers keep only {_figure(seen.in_flight)} of {_figure(seen.limit)} in flight, on "
        "average: their documents have few pages, or pages are drawn too slowly. Raise "
        "OCR_WORKER_CONCURRENCY, or give them more CPU"
    )


def _waits(pages: int) -> str:
    return f"{counted(pages, 'page')} {'waits' if pages == 1 else 'wait'}"


def _figure(number: float) -> str:
    """Small ones with a digit after the point, where it says something."""
    return f"{number:.0f}" if number >= _PLAIN else f"{number:.1f}".removesuffix(".0")


def _mean(values: Iterable[float]) -> float:
    kept = list(values)
    return sum(kept) / len(kept) if kept else 0.0
