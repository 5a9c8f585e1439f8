"""Polls jobs on RunPod and settles those that ended. Used by the ocr worker and maintenance."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeVar

from rag_service import errors
from rag_service.config.options import Settings
from rag_service.errors import LayoutUnavailable, OcrRejected, PageError
from rag_service.jobs import remote_jobs, server_state
from rag_service.jobs.remote_jobs import JobRow
from rag_service.jobs.run_pages import StoredPage
from rag_service.runpod.job_format import JobOutput, PageOutput, PageProblem
from rag_service.runpod.job_rules import (
    CancelIt,
    Ended,
    Verdict,
    judge,
    judge_silence,
    judge_unknown,
    poll_interval,
)
from rag_service.runpod.runpod_client import (
    EndpointRefused,
    JobNotFound,
    JobReport,
    PollFailed,
    RunPodClient,
)
from rag_service.runtime.retry import LONGEST_RETRY_AFTER
from rag_service.states import JobOutcome, PageState, PostReason

log = logging.getLogger(__name__)

T = TypeVar("T")
# Polls at once; RunPod allows an endpoint 400.
AT_ONCE = 20
_REFUSED_PAUSE = 30.0
# What a page's error on the handler's side is called here; the same again changes nothing.
_LASTING = {
    error.code: error
    for error in (
        errors.PageTooLarge,
        errors.PageTimeout,
        errors.PageUnrenderable,
        errors.OcrRejected,
        errors.OcrEmpty,
        errors.OcrRepetition,
    )
}
# What a page is called that its handler has remarked this about.
_STATES = {"page_without_text": PageState.NO_TEXT, "page_truncated": PageState.TRUNCATED}


async def poll_due(settings: Settings, *, run_id: str | None = None) -> int:
    """Poll the jobs whose time has come; how many were."""
    due = await _call(lambda: remote_jobs.claim_due(AT_ONCE, run_id=run_id))
    by_endpoint: dict[tuple[str, str], list[JobRow]] = {}
    for job in due:
        by_endpoint.setdefault((job.base_url, job.endpoint_id), []).append(job)
    for (base_url, endpoint_id), jobs in by_endpoint.items():
        client = RunPodClient(settings.runpod, base_url=base_url, endpoint_id=endpoint_id)
        async with client:
            polls = (_poll(job, client, settings) for job in jobs)
            # The client stays open until the last poll has ended, whatever became of the others.
            for outcome in await asyncio.gather(*polls, return_exceptions=True):
                if outcome is not None:
                    raise outcome
    return len(due)


async def _poll(job: JobRow, client: RunPodClient, settings: Settings) -> None:
    remote_id = job.remote_id or job.hinted_id
    if remote_id is None:
        await _wait_for_id(job, settings)
        return
    report, known, complaint = None, True, ""
    try:
        report = await client.status(remote_id)
        verdict = judge(job, report, settings.runpod)
    except JobNotFound:
        known = False
        verdict = judge_unknown(job, settings.runpod)
    except PollFailed as error:
        complaint = error.message
        log.info("Job %s: the poll failed: %s", remote_id, error)
        wait = _wish(poll_interval(job.age, settings.runpod), error.retry_after, settings)
        verdict = judge_silence(job, settings.runpod, wait)
    except EndpointRefused as error:
        complaint = error.message
        await _call(partial(_mark_misconfigured, client.url, complaint))
        verdict = judge_silence(job, settings.runpod, _REFUSED_PAUSE)
    if job.remote_id is None and not (known and _may_be(job, report)):
        await _call(lambda: remote_jobs.forget_hint(job.id, remote_id))
        await _wait_for_id(job, settings)
        return
    await _apply(job, verdict, client, settings, report, complaint)


def _mark_misconfigured(url: str, complaint: str) -> None:
    if server_state.mark_out(url, complaint, misconfigured=True):
        log.warning("Jobs cannot be asked for: %s", complaint)


def _wish(pause: float, retry_after: float | None, settings: Settings) -> float:
    """Seconds until the next poll: RunPod's wish is spread upwards, lest all come at once."""
    if retry_after is None:
        return pause
    asked = min(max(pause, retry_after), LONGEST_RETRY_AFTER)
    return asked * random.uniform(1, 1 + settings.retry.jitter)


def _may_be(job: JobRow, report: JobReport | None) -> bool:
    """Whether the job that a webhook named is not plainly another one of ours."""
    output = report.output if report else None
    key = output.get("request_key") if isinstance(output, dict) else None
    return key is None or key == job.request_key


async def _wait_for_id(job: JobRow, settings: Settings) -> None:
    """No id came yet: past its ttl there will be none."""
    if job.left > 0:
        pause = min(settings.runpod.poll_max, max(job.left, settings.runpod.poll_min))
        await _call(lambda: remote_jobs.note_poll(job.id, next_in=pause))
        return
    verdict = judge_unknown(job, settings.runpod)
    if isinstance(verdict, Ended):
        await _settle(job, verdict, None)


async def _apply(
    job: JobRow,
    verdict: Verdict,
    client: RunPodClient,
    settings: Settings,
    report: JobReport | None,
    complaint: str,
) -> None:
    if isinstance(verdict, Ended):
        await _settle(job, verdict, report)
        return
    if isinstance(verdict, CancelIt):
        pause = await _cancel(job, client, settings)
    else:
        pause = verdict.seconds
    told = _told(report)
    await _call(
        lambda: remote_jobs.note_poll(
            job.id,
            next_in=pause,
            status=told.get("last_status"),
            delay_ms=told.get("delay_ms"),
            execution_ms=told.get("execution_ms"),
            error=complaint,
            adopted_id=job.hinted_id if report and job.remote_id is None else None,
            deadline_passed=isinstance(verdict, CancelIt) and not job.cancel_wanted,
        )
    )


async def _cancel(job: JobRow, client: RunPodClient, settings: Settings) -> float:
    """Ask for the cancellation; seconds until the confirmation is looked for."""
    remote_id = job.remote_id or job.hinted_id or ""
    pause = poll_interval(job.age, settings.runpod)
    log.info("Cancelling job %s of run %s", remote_id, job.run_id)
    try:
        await client.cancel(remote_id)
    except PollFailed as error:
        log.warning("Job %s could not be cancelled yet: %s", remote_id, error)
        return _wish(pause, error.retry_after, settings)
    except EndpointRefused as error:
        log.warning("Job %s may not be cancelled: %s", remote_id, error)
        return _REFUSED_PAUSE
    return pause


async def _settle(job: JobRow, ended: Ended, report: JobReport | None) -> None:
    so_far = await _call(lambda: remote_jobs.reasons_so_far(job.run_id))
    pages, reasons = results(job, ended, so_far)
    told = _told(report)
    if report is not None and job.remote_id is None:
        told["remote_id"] = job.hinted_id
    if ended.output is not None and ended.output.gauges is not None:
        told["gauges"] = ended.output.gauges.model_dump()
    # In the place of what a failed poll may have said.
    told["error_message"] = _said(ended)
    if ended.output is not None and ended.output.debug:
        log.info("Job of run %s says: %s", job.run_id, " | ".join(ended.output.debug))
    await _call(lambda: remote_jobs.settle(job, ended.outcome, pages, reasons, told))
    log.info("A job of run %s ended: %s", job.run_id, ended.outcome)


def _said(ended: Ended) -> str | None:
    if ended.error is None:
        return "Cancelled: its run had ended."
    return None if ended.outcome is JobOutcome.COMPLETED else ended.error.message


def _told(report: JobReport | None) -> dict[str, Any]:
    if report is None:
        return {}
    told = {
        "last_status": report.word,
        "delay_ms": report.delay_ms,
        "execution_ms": report.execution_ms,
    }
    return {name: value for name, value in told.items() if value is not None}


def results(
    job: JobRow, ended: Ended, so_far: Mapping[int, Collection[PostReason]]
) -> tuple[list[StoredPage], dict[int, PostReason]]:
    """What the job's end stores of each of its pages, and why those left would be posted again.

    `so_far`: why each page was posted until now; for its own failure none is posted twice.
    A job that we cancelled leaves its pages as they are.
    """
    if ended.error is None:
        return [], {}
    found = {page.page: page for page in (ended.output.pages if ended.output else [])}
    remaining = _remaining(job, ended.output)
    stored: list[StoredPage] = []
    reasons: dict[int, PostReason] = {}
    for number in job.pages:
        if number in remaining:
            reasons[number] = PostReason.REMAINING_PAGES
            continue
        page = found.get(number)
        if page is not None and page.error is None:
            stored.append(_read(page, ended.output))
            continue
        error, lasting = _page_error(page, ended.error)
        spent = lasting or ended.repost in so_far.get(number, ())
        again = None if spent else ended.repost
        if again is not None:
            reasons[number] = again
        stored.append(_failed(number, error, again))
    return stored, reasons


def _remaining(job: JobRow, output: JobOutput | None) -> set[int]:
    """Pages that did not fit the answer; one that brought none of the job's made no progress."""
    if output is None:
        return set()
    brought = {page.page for page in output.pages}
    return set(output.remaining_pages) - brought if brought & set(job.pages) else set()


def _page_error(page: PageOutput | None, of_job: PageError) -> tuple[PageError, bool]:
    """The page's own error, or the job's; and whether the same again would change nothing."""
    if page is None or page.error is None:
        return of_job, False
    known = _LASTING.get(page.error.code)
    if known is not None:
        return known(page.error.message), True
    if page.error.code == LayoutUnavailable.code:
        return LayoutUnavailable(page.error.message), False
    return OcrRejected(f"{page.error.message} ({page.error.code})"), False


def _failed(number: int, error: PageError, again: PostReason | None) -> StoredPage:
    return StoredPage(
        number=number,
        state=PageState.FAILED,
        markdown="",
        columns={},
        error=None if again else error,
        retry_in=0.0 if again else None,
    )


def _read(page: PageOutput, output: JobOutput | None) -> StoredPage:
    engine = output.engine if output else None
    remarks = page.warnings or _own_remarks(page)
    states = [_STATES[remark.code] for remark in remarks if remark.code in _STATES]
    return StoredPage(
        number=page.page,
        state=states[0] if states else PageState.OCR,
        markdown=page.markdown.strip(),
        columns={
            "finish_reason": page.finish_reason,
            "prompt_tokens": page.tokens.prompt,
            "completion_tokens": page.tokens.completion,
            "seconds": page.seconds,
            "dpi": page.dpi,
            "engine": engine.name if engine else None,
            "model": engine.model if engine else None,
            "parser_version": page.parser_version,
        },
        regions=[region.model_dump() for region in page.regions],
        warnings=[remark.model_dump() for remark in remarks],
    )


def _own_remarks(page: PageOutput) -> list[PageProblem]:
    """What must be said of a page of which its handler says nothing."""
    if not page.markdown.strip():
        message = "Two readings found ink but no writing."
        return [PageProblem(code="page_without_text", message=message)]
    if page.finish_reason == "length":
        return [PageProblem(code="page_truncated", message="The text stops at the token limit.")]
    return []


async def _call(function: Callable[[], T]) -> T:
    return await asyncio.to_thread(function)
