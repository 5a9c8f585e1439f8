"""A document's state in words and cells for people. Used by tables and progress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING

from rag_service.diagnosis.bottleneck import Verdict
from rag_service.runtime.plural import counted
from rag_service.states import TERMINAL, RunState, WaitingFor

if TYPE_CHECKING:
    from rag_service.knowledgebase.views import (
        DocumentView,
        ErrorView,
        PageCounts,
        ServerView,
        WarningView,
    )

_MINUTE, _HOUR = 60, 3600
_WAITS = {
    WaitingFor.WORKER: "no worker is alive",
    WaitingFor.QUEUE: "in the queue",
    WaitingFor.OCR_SERVER: "the OCR server is away",
    WaitingFor.REMOTE_JOB: "for a job on RunPod",
    WaitingFor.RETRY: "for a later try",
    WaitingFor.MEMORY_GUARD: "the machine is short of memory",
}
_VERDICTS = {
    Verdict.UNKNOWN: "not known",
    Verdict.IDLE: "idle",
    Verdict.STARVED: "starved",
    Verdict.FRONT_END_BOUND: "bound by its front end",
    Verdict.KV_BOUND: "bound by its KV cache",
    Verdict.SATURATED: "full",
    Verdict.OVERLOADED: "overloaded",
    Verdict.SERIALISING: "one page at a time",
}


def ended(view: DocumentView) -> bool:
    """Whether nothing is at work on the document any more."""
    return view.latest_run.status in TERMINAL


def succeeded(view: DocumentView) -> bool:
    """Whether the newest run ended well."""
    return view.latest_run.status is RunState.PROCESSED


def state(view: DocumentView) -> str:
    """Status, and what else must be known to read it rightly."""
    parts = [str(view.status)]
    if view.incomplete:
        parts.append("(incomplete)")
    if view.latest_run.status != view.status:
        parts.append(f"(newest run: {view.latest_run.status})")
    return " ".join(parts)


def waiting(view: DocumentView) -> str:
    """Why the newest run waits and at which place; empty where it does not."""
    if view.waiting_for is None:
        return ""
    reason = _WAITS[view.waiting_for]
    return f"{reason}, place {view.queue_position}" if view.queue_position else reason


def pages(counts: PageCounts) -> str:
    """Read of all, and those that failed: `3/10`, `0/1, 1 failed`; nothing while none is known."""
    if counts.total is None:
        return ""
    failed = f", {counts.failed} failed" if counts.failed else ""
    return f"{counts.done - counts.failed}/{counts.total}{failed}"


def progress(view: DocumentView) -> str:
    """The newest run's state, page x of y, the time left or why it waits."""
    run = view.latest_run
    parts = [str(run.status)]
    if run.pages.total:
        parts.append(f"page {run.pages.done} of {run.pages.total}")
    if run.pages.failed:
        parts.append(f"{run.pages.failed} failed")
    if view.eta_seconds and not ended(view):
        parts.append(f"{duration(view.eta_seconds)} left")
    if view.waiting_for:
        parts.append(f"waits: {waiting(view)}")
    if run.error:
        parts.append(f"{run.error.code}: {run.error.message}")
    return ", ".join(parts)


def error(found: ErrorView | None) -> str:
    return f"{found.code}: {found.message}" if found else ""


def warning_counts(warnings: Iterable[WarningView]) -> str:
    """`page_truncated x2, repaired_pdf`."""
    counts = Counter(warning.code for warning in warnings)
    return ", ".join(f"{code} x{n}" if n > 1 else code for code, n in sorted(counts.items()))


def status_counts(views: Iterable[DocumentView]) -> str:
    """`3 documents: 2 processed, 1 failed`."""
    counts = Counter(str(view.status) for view in views)
    total = sum(counts.values())
    listed = ", ".join(f"{n} {status}" for status, n in counts.most_common())
    return counted(total, "document") + (f": {listed}" if listed else "")


def page_ranges(numbers: Iterable[int]) -> str:
    """`1-8, 12`."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in ranges)


def duration(seconds: float | None) -> str:
    """4.2 s, 3 min 05 s, 2 h 10 min."""
    if seconds is None:
        return ""
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02d} s"
    return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02d} min"


def moment(when: datetime) -> str:
    """Local time to the second."""
    return f"{when.astimezone():%Y-%m-%d %H:%M:%S}"


def server(view: ServerView) -> str:
    """How full an OCR server is, who is the bottleneck, and what to do."""
    since = f" since {moment(view.starved_since)}" if view.starved_since else ""
    rate = f"{view.latest.pages_per_minute:.0f} pages in the last minute"
    state = f"{view.url}: {_VERDICTS[view.latest.verdict]}{since}, {rate}. {view.latest.sentence}"
    return state + _last_change(view)


def _last_change(view: ServerView) -> str:
    """Return why a fork last changed its number in flight for longer than a trial."""
    lasting = (change for change in view.limit_changes if not change.reason.is_trial)
    if (change := next(lasting, None)) is None:
        return ""
    return (
        f" Last change of the requests in flight of a fork: {change.old:.1f} -> {change.new:.1f}, "
        f"{change.reason} ({change.fork}, {moment(change.at)})."
    )
