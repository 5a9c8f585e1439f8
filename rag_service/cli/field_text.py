"""Texts for tables and progress lines: states, pages, reasons to wait, errors, times."""

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
        Action,
        DocumentView,
        ErrorView,
        PageCounts,
        ReprocessJobView,
        ServerView,
        SummaryView,
        WarningView,
    )

_MINUTE, _HOUR = 60, 3600
_WAITS = {
    WaitingFor.WORKER: "no worker is running",
    WaitingFor.QUEUE: "in the queue",
    WaitingFor.OCR_SERVER: "for the OCR server, which is out",
    WaitingFor.REMOTE_JOB: "for a job on RunPod",
    WaitingFor.RETRY: "for a later try of a page",
    WaitingFor.MEMORY_GUARD: "for free memory on the worker's machine",
    WaitingFor.STORAGE: "for the document store, which cannot be reached",
}
_VERDICTS = {
    Verdict.UNKNOWN: "unknown",
    Verdict.IDLE: "idle",
    Verdict.STARVED: "starved",
    Verdict.FRONT_END_BOUND: "limited by its front end",
    Verdict.KV_BOUND: "limited by its KV cache",
    Verdict.SATURATED: "full",
    Verdict.OVERLOADED: "overloaded",
    Verdict.SERIALISING: "one page at a time",
}

_REDO_ACTIONS = {
    "queued": "queued",
    "would_queue": "would be queued",
    "skipped_active": "skipped, already in progress",
    "nothing_to_redo": "nothing to redo",
    "no_such_page": "has no such page",
}


def ended(view: DocumentView) -> bool:
    """Return whether the document's newest run is finished."""
    return view.latest_run.status in TERMINAL


def succeeded(view: DocumentView) -> bool:
    """Return whether the newest run ended as `processed`."""
    return view.latest_run.status is RunState.PROCESSED


def state(view: DocumentView) -> str:
    """Return the status; marked if the text is incomplete or the newest run differs."""
    parts = [str(view.status)]
    if view.incomplete:
        parts.append("(incomplete)")
    if view.latest_run.status != view.status:
        parts.append(f"(newest run: {view.latest_run.status})")
    return " ".join(parts)


def short_state(view: DocumentView) -> str:
    """Return the status; the newest run's with a `*` if the text is incomplete or older."""
    differs = view.incomplete or view.latest_run.status != view.status
    return f"{view.latest_run.status}{'*' if differs else ''}"


def waiting(view: DocumentView) -> str:
    """Return why the newest run waits and its place in the queue, or "" if it does not wait."""
    if view.waiting_for is None:
        return ""
    reason = _WAITS[view.waiting_for]
    return f"{reason}, place {view.queue_position}" if view.queue_position else reason


def pages(counts: PageCounts) -> str:
    """Return `3/10` or `0/1, 1 failed`: pages read of all; "" while the total is unknown."""
    if counts.total is None:
        return ""
    failed = f", {counts.failed} failed" if counts.failed else ""
    return f"{counts.done - counts.failed}/{counts.total}{failed}"


def progress(view: DocumentView) -> str:
    """Return the newest run's state, its pages, the time left, why it waits, its error."""
    run = view.latest_run
    parts = [str(run.status)]
    if run.pages.total:
        parts.append(f"page {run.pages.done} of {run.pages.total}")
    if run.pages.failed:
        parts.append(f"{run.pages.failed} failed")
    if view.eta_seconds and not ended(view):
        parts.append(f"{duration(view.eta_seconds)} left")
    if view.waiting_for:
        parts.append(f"waiting: {waiting(view)}")
    if view.waiting_message:
        parts[-1] += f": {view.waiting_message}"
    if run.error:
        parts.append(f"{run.error.code}: {run.error.message}")
    return ", ".join(parts)


def error(found: ErrorView | None) -> str:
    return f"{found.code}: {found.message}" if found else ""


def warning_counts(warnings: Iterable[WarningView]) -> str:
    """Return `page_truncated x2, repaired_pdf`."""
    counts = Counter(warning.code for warning in warnings)
    return ", ".join(f"{code} x{n}" if n > 1 else code for code, n in sorted(counts.items()))


def status_counts(views: Iterable[DocumentView]) -> str:
    """Return `3 documents: 2 processed, 1 failed`."""
    counts = Counter(str(view.status) for view in views)
    total = sum(counts.values())
    listed = ", ".join(f"{n} {status}" for status, n in counts.most_common())
    return counted(total, "document") + (f": {listed}" if listed else "")


def waiting_work(summary: SummaryView) -> str:
    """Return how many documents and pages wait and how long that takes, or "" if none waits."""
    if not summary.documents_waiting and not summary.pages_waiting:
        return ""
    more = "more than " if summary.lower_bound else ""
    text = f"Waiting: {more}{counted(summary.documents_waiting, 'document')}"
    if summary.pages_waiting:
        text += f", {counted(summary.pages_waiting, 'page')} for the OCR server"
    if summary.documents_without_plan:
        text += f"; {summary.documents_without_plan} not opened yet"
    if summary.eta_seconds is not None and summary.pages_waiting:
        text += f"; about {duration(summary.eta_seconds)} at the rate of the last minute"
    return text + "."


def reprocess_job(job: ReprocessJobView) -> str:
    """Return the progress of a reprocess job."""
    text = f"Reprocess job {job.id}: {job.state}, {job.handled} of {job.total} documents"
    counts = [f"{number} {redo_action(action)}" for action, number in job.counts.items()]
    if counts:
        text += f" ({', '.join(counts)})"
    if job.runs_active or job.runs_failed:
        text += f"; of its runs {job.runs_active} in progress, {job.runs_failed} failed"
    return f"{text}. {job.message}" if job.message else f"{text}."


def redo_action(action: Action) -> str:
    """Return what a reprocess did, or would do, with a document."""
    return _REDO_ACTIONS[action]


def failures(summary: SummaryView) -> list[tuple[str, str, str, str]]:
    """Return code, number of documents, the command that selects them, and a message, by cause."""
    return [
        (
            failure.code, str(failure.documents),
            f"rag-service {'reprocess' if failure.retryable else 'status'} --error {failure.code}",
            failure.example,
        )
        for failure in summary.failures
    ]  # fmt: skip


def page_ranges(numbers: Iterable[int]) -> str:
    """Return `1-8, 12`."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in ranges)


def duration(seconds: float | None) -> str:
    """Return 4.2 s, 3 min 05 s or 2 h 10 min."""
    if seconds is None:
        return ""
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02d} s"
    return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02d} min"


def moment(when: datetime) -> str:
    """Return the local time to the second."""
    return f"{when.astimezone():%Y-%m-%d %H:%M:%S}"


def server(view: ServerView) -> str:
    """Return how busy an OCR server is, the bottleneck, and what to do."""
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
