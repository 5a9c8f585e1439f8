"""Diagnosis of an OCR server from samples: how full it is, and what limits the pages a minute.

Pure: samples come in, a verdict and a sentence come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from rag_service.diagnosis import remedies
from rag_service.diagnosis.thresholds import THRESHOLDS
from rag_service.runtime.plural import counted

# Figures from here on are shown as whole numbers.
_WHOLE_FROM = 9.5


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
    """A server's load at one moment.

    `running`, `waiting`, `cache_use` (0 to 1) and `tokens_per_second` are the server's gauges,
    None if it has none. `in_flight`: open requests of all forks; `limit`: the sum of the forks'
    limits, None if no fork is at work; `pages_waiting`: pages that were not sent yet.
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
class JobQueue:
    """An endpoint's live jobs: how many, how many of them no worker has begun, pages of the
    largest, and the most that a job may have.
    """

    live: int = 0
    queued: int = 0
    most_pages: int = 0
    pages_limit: int = 0


@dataclass(frozen=True, slots=True)
class ClientMode:
    """How pages are sent to the server.

    `adaptive`: forks search for the best number in flight; `remote`: pages are sent in jobs, and
    the gauges are means of jobs that ended; `low_memory`: the memory guard lets no new work begin;
    `jobs`: the endpoint's live jobs.
    """

    adaptive: bool = True
    remote: bool = False
    low_memory: bool = False
    jobs: JobQueue = JobQueue()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The verdict, and a sentence that says why and what to do."""

    verdict: Verdict
    sentence: str


def diagnose(samples: Sequence[LoadSample], mode: ClientMode | None = None) -> Diagnosis:
    """Return what the samples of the last minute show; `starved` only if pages waited in each."""
    if not samples:
        return Diagnosis(Verdict.UNKNOWN, "No sample of the server yet.")
    load = _MeanLoad.of(samples, mode or ClientMode())
    for rule in _RULES:
        diagnosis = rule(load)
        if diagnosis is not None:
            return diagnosis
    return _client_bound(load)


@dataclass(frozen=True, slots=True)
class _MeanLoad:
    """Means over the samples; `backlog`: the fewest pages that waited in any of them.

    `in_flight_now` and `pages_waiting` are of the last sample. `is_over`: the last sample shows
    no work at all, whatever came before.
    """

    mode: ClientMode
    has_gauges: bool
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
    is_over: bool

    @classmethod
    def of(cls, samples: Sequence[LoadSample], mode: ClientMode) -> _MeanLoad:
        running = [s.running for s in samples if s.running is not None]
        last = samples[-1]
        # Between two documents a fork has no limit for a moment; twice in a row none is at work.
        at_work = any(s.limit for s in samples[-2:])
        limits = [s.limit for s in samples if s.limit and at_work]
        return cls(
            mode=mode,
            has_gauges=bool(running),
            running=_mean(running),
            waiting=_mean(s.waiting for s in samples if s.waiting is not None),
            most_running=max(running, default=0.0),
            slots=next((s.slots for s in reversed(samples) if s.slots), None),
            cache_use=_mean(s.cache_use for s in samples if s.cache_use is not None),
            in_flight=_mean(s.in_flight for s in samples),
            in_flight_now=last.in_flight,
            limit=_mean(limits) if limits else None,
            limit_moves=bool(limits) and max(limits) > THRESHOLDS.moving_limit_factor * min(limits),
            backlog=min(s.pages_waiting for s in samples),
            pages_waiting=last.pages_waiting,
            is_over=not (last.running or last.waiting or last.in_flight or last.pages_waiting),
        )

    @property
    def in_server(self) -> str:
        """The server's gauges in words."""
        of_slots = f" on {counted(self.slots, 'slot')}" if self.slots else ""
        running, waiting = _format_number(self.running), _format_number(self.waiting)
        return f"on average {running} running{of_slots} and {waiting} waiting"

    def uses_slots(self, share: float) -> bool:
        """Return whether that share of the slots is in use; False if they are not known."""
        if self.slots is None:
            return False
        return self.running >= min(share * self.slots, self.slots - THRESHOLDS.free_slots)


def _idle(load: _MeanLoad) -> Diagnosis | None:
    some = THRESHOLDS.some_waiting
    works = load.pages_waiting or load.in_flight >= some or load.running >= some
    if works and not load.is_over:
        return None
    return Diagnosis(Verdict.IDLE, "No page waits for the server.")


def _jobs_without_worker(load: _MeanLoad) -> Diagnosis | None:
    jobs = load.mode.jobs
    if not load.mode.remote or not jobs.live or jobs.queued < jobs.live:
        return None
    return Diagnosis(
        Verdict.UNKNOWN,
        f"{counted(jobs.queued, 'job')} on RunPod, none at work: the endpoint starts a worker, or "
        "has none. If it lasts, check its maximum of workers on RunPod.",
    )


def _no_job_gauges(load: _MeanLoad) -> Diagnosis | None:
    if load.has_gauges or not load.mode.remote:
        return None
    return Diagnosis(Verdict.UNKNOWN, "No job that ended lately reported gauges.")


def _serialising(load: _MeanLoad) -> Diagnosis | None:
    is_single = load.most_running <= 1 and load.slots in (None, 1)
    if not load.has_gauges or not is_single or load.waiting < THRESHOLDS.some_waiting:
        return None
    return Diagnosis(
        Verdict.SERIALISING,
        f"The server works on one request at a time while {load.waiting:.1f} wait; one waiting "
        f"request is enough. {remedies.SERIALISING.action}",
    )


def _overloaded(load: _MeanLoad) -> Diagnosis | None:
    share = THRESHOLDS.many_waiting_share
    if load.waiting <= max(THRESHOLDS.many_waiting, share * load.running):
        return None
    action = (
        "`auto` will send fewer soon, unless they are another client's requests"
        if load.mode.adaptive
        else f"{remedies.AUTO} or to a lower number"
    )
    return Diagnosis(
        Verdict.OVERLOADED,
        f"Too many requests are in flight: {load.in_server}; {action}. {remedies.ONLY_LATENCY}",
    )


def _kv_bound(load: _MeanLoad) -> Diagnosis | None:
    if load.cache_use < THRESHOLDS.full_cache_share or _is_full(load):
        return None
    return Diagnosis(
        Verdict.KV_BOUND,
        f"KV cache {load.cache_use:.0%} full, {load.in_server}: {remedies.KV_BOUND.meaning}. "
        f"{remedies.KV_BOUND.action}",
    )


def _saturated(load: _MeanLoad) -> Diagnosis | None:
    if load.waiting < THRESHOLDS.some_waiting and not _is_full(load):
        return None
    return Diagnosis(
        Verdict.SATURATED,
        f"The server is working at its limit: {load.in_server}. {remedies.SATURATED.action}",
    )


def _is_full(load: _MeanLoad) -> bool:
    return load.uses_slots(THRESHOLDS.full_slots_share)


def _front_end_bound(load: _MeanLoad) -> Diagnosis | None:
    # The mean still contains forks that died a moment ago.
    in_flight = min(load.in_flight, load.in_flight_now)
    is_comparable = load.has_gauges and not load.mode.remote
    if not is_comparable or in_flight < THRESHOLDS.front_end_in_flight:
        return None
    near_slots = bool(load.slots and load.in_flight >= THRESHOLDS.busy_slots_share * load.slots)
    is_enough = load.mode.adaptive or near_slots
    ratio = THRESHOLDS.front_end_ratio if is_enough else THRESHOLDS.clear_front_end_ratio
    if in_flight <= ratio * (load.running + load.waiting):
        return None
    return Diagnosis(
        Verdict.FRONT_END_BOUND,
        f"{_format_number(in_flight)} requests are in flight, but in the server {load.in_server}: "
        f"{remedies.FRONT_END_BOUND.meaning}. {remedies.FRONT_END_BOUND.action}",
    )


def _no_backlog(load: _MeanLoad) -> Diagnosis | None:
    if load.backlog:
        return None
    if load.pages_waiting:
        return Diagnosis(
            Verdict.UNKNOWN,
            f"{_count_waiting(load.pages_waiting)}, but none did in an earlier sample: too early "
            "to say.",
        )
    if load.in_flight < THRESHOLDS.some_waiting:
        return Diagnosis(
            Verdict.IDLE, "No page waits for the server; it runs another client's requests."
        )
    return Diagnosis(Verdict.IDLE, "The last pages are in flight; no more pages wait.")


def _remote_jobs(load: _MeanLoad) -> Diagnosis | None:
    if not load.mode.remote:
        return None
    if load.slots is None:
        return Diagnosis(
            Verdict.UNKNOWN,
            f"In its jobs {load.in_server}; set occupancy.slots to the number of requests that "
            "the server can batch.",
        )
    if load.uses_slots(THRESHOLDS.busy_slots_share):
        return Diagnosis(Verdict.SATURATED, f"Its jobs keep the server busy: {load.in_server}.")
    jobs = load.mode.jobs
    if jobs.most_pages < jobs.pages_limit:
        return Diagnosis(
            Verdict.SATURATED,
            f"{_count_waiting(load.pages_waiting)}; no job has more than "
            f"{counted(jobs.most_pages, 'page')}, because the documents have no more or "
            "runpod.max_body_bytes allows no more. More workers on RunPod read more.",
        )
    return Diagnosis(
        Verdict.STARVED,
        f"{_count_waiting(load.pages_waiting)}, and in its jobs {load.in_server}: the jobs have "
        "too few pages. Raise runpod.max_pages_per_job.",
    )


# The first rule that returns a diagnosis decides; if none does, the client is the limit.
_RULES: tuple[Callable[[_MeanLoad], Diagnosis | None], ...] = (
    _jobs_without_worker,
    _idle,
    _no_job_gauges,
    _serialising,
    _overloaded,
    _kv_bound,
    _saturated,
    _front_end_bound,
    _no_backlog,
    _remote_jobs,
)


def _client_bound(load: _MeanLoad) -> Diagnosis:
    """Diagnose waiting pages in front of a server that could take more or shows no gauges."""
    is_used = load.limit is not None and (
        load.in_flight >= THRESHOLDS.used_limit_share * load.limit
    )
    if is_used and load.mode.adaptive:
        return _limit_found_by_search(load)
    if is_used and not load.has_gauges:
        return Diagnosis(
            Verdict.UNKNOWN,
            f"As many requests are in flight as the settings allow "
            f"({_format_number(load.limit or 0)}), and the server has no gauges. "
            "GLMOCR_PIPELINE_MAX_WORKERS=auto finds the best number.",
        )
    state = f" ({load.in_server})" if load.has_gauges else ""
    return Diagnosis(
        Verdict.STARVED,
        f"{_count_waiting(load.pages_waiting)}, but {_starvation_cause(load, is_used)}{state}.",
    )


def _limit_found_by_search(load: _MeanLoad) -> Diagnosis:
    """Diagnose a server on which the forks use the whole limit that their search found."""
    if load.limit_moves:
        return Diagnosis(
            Verdict.UNKNOWN,
            "The search for the best number in flight goes on; now "
            f"{_format_number(load.in_flight_now)}.",
        )
    if not load.has_gauges and load.in_flight <= THRESHOLDS.serial_in_flight:
        return Diagnosis(
            Verdict.SERIALISING,
            f"By the times of its answers {remedies.SERIALISING.meaning}. "
            f"{remedies.ONLY_LATENCY} {remedies.SERIALISING.action}",
        )
    gauges = f": {load.in_server}" if load.has_gauges else ""
    return Diagnosis(
        Verdict.SATURATED,
        f"More than {_format_number(load.in_flight)} in flight bring no more pages{gauges}. "
        f"{remedies.SATURATED.action}",
    )


def _starvation_cause(load: _MeanLoad, is_limit_used: bool) -> str:
    if load.mode.low_memory:
        return (
            "this machine has too little memory available, so the memory guard lets no new work "
            "begin: free memory, or lower memory_guard.min_available_mib"
        )
    if load.limit is None:
        return "no fork sends any: check the ocr workers"
    limit = _format_number(load.limit)
    if is_limit_used:
        return f"the settings allow only {limit} in flight: {remedies.AUTO}"
    return (
        f"the workers keep only {_format_number(load.in_flight)} of {limit} in flight, on "
        "average: their documents have few pages, or pages are rendered too slowly. Raise "
        "OCR_WORKER_CONCURRENCY, or give the workers more CPU"
    )


def _count_waiting(pages: int) -> str:
    return f"{counted(pages, 'page')} {'waits' if pages == 1 else 'wait'}"


def _format_number(number: float) -> str:
    """Format with one decimal if the number is small and the decimal is not 0."""
    return f"{number:.0f}" if number >= _WHOLE_FROM else f"{number:.1f}".removesuffix(".0")


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0
