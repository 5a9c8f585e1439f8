"""Poll jobs on RunPod and carry out what `runpod.decisions` decides about each answer."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any, TypeVar, assert_never

from rag_service.config.options import Settings
from rag_service.jobs import remote_jobs, server_state
from rag_service.jobs.remote_jobs import JobEnd, JobRow, PollNote
from rag_service.runpod.decisions import (
    REFUSED_PAUSE,
    CancelJob,
    ForgetHint,
    JobEnded,
    KeepWaiting,
    KeyRefused,
    NoAnswer,
    NoJobId,
    PollOutcome,
    PollReport,
    ServerMisconfigured,
    UnknownJob,
    decide,
)
from rag_service.runpod.runpod_client import (
    EndpointRefused,
    JobNotFound,
    JobReport,
    PollFailed,
    RunPodClient,
)
from rag_service.runtime.retry import LONGEST_RETRY_AFTER
from rag_service.states import JobOutcome
from workers.remote.page_results import page_results

log = logging.getLogger(__name__)

T = TypeVar("T")
# Polls at the same time; RunPod allows 400 for each endpoint.
AT_ONCE = 20


async def poll_due(settings: Settings, *, run_id: str | None = None) -> int:
    """Poll the jobs whose poll is due, of one run or of all; return how many there were."""
    due = await _call(lambda: remote_jobs.claim_due(AT_ONCE, run_id=run_id))
    by_endpoint: dict[tuple[str, str], list[JobRow]] = {}
    for job in due:
        by_endpoint.setdefault((job.base_url, job.endpoint_id), []).append(job)
    for (base_url, endpoint_id), jobs in by_endpoint.items():
        client = RunPodClient(settings.runpod, base_url=base_url, endpoint_id=endpoint_id)
        async with client:
            polls = (JobPoll(job, client, settings).run() for job in jobs)
            # The client stays open until the last poll has ended, even if another one failed.
            for error in await asyncio.gather(*polls, return_exceptions=True):
                if error is not None:
                    raise error
    return len(due)


class JobPoll:
    """One poll of one job: ask, decide, apply."""

    def __init__(self, job: JobRow, client: RunPodClient, settings: Settings) -> None:
        self._job = job
        self._client = client
        self._settings = settings

    async def run(self) -> None:
        """Poll the job once."""
        report = await self._ask()
        await self.apply(decide(self._job, report, self._settings.runpod), report)

    async def _ask(self) -> PollReport:
        remote_id = self._job.remote_id or self._job.hinted_id
        if remote_id is None:
            return NoJobId()
        try:
            return await self._client.status(remote_id)
        except JobNotFound:
            return UnknownJob()
        except PollFailed as error:
            log.info("Job %s: the poll failed: %s", remote_id, error)
            return NoAnswer(error.message, error.retry_after)
        except EndpointRefused as error:
            return KeyRefused(error.message)

    async def apply(self, outcome: PollOutcome, report: PollReport) -> None:
        """Write the outcome to the job's rows and do what else it asks for."""
        match outcome:
            case KeepWaiting():
                pause = self._spread(outcome.seconds) if outcome.jitter else outcome.seconds
                await self._note(report, pause)
            case CancelJob():
                pause = await self._cancel(outcome.seconds)
                await self._note(report, pause, deadline_passed=outcome.for_deadline)
            case JobEnded():
                await self._end(outcome, report)
            case ForgetHint():
                await self._forget_hint()
                await self.apply(outcome.then, NoJobId())
            case ServerMisconfigured():
                await _call(lambda: _mark_misconfigured(self._client.url, outcome.message))
                await self.apply(outcome.then, report)
            case _:
                assert_never(outcome)

    async def _note(
        self, report: PollReport, pause: float, *, deadline_passed: bool = False
    ) -> None:
        columns = _reported_columns(report)
        note = PollNote(
            next_in=pause,
            status=columns.get("last_status"),
            delay_ms=columns.get("delay_ms"),
            execution_ms=columns.get("execution_ms"),
            error=_poll_error(report),
            adopted_id=self._confirmed_id(report),
            deadline_passed=deadline_passed,
        )
        await _call(lambda: remote_jobs.note_poll(self._job.id, note))

    async def _cancel(self, pause: float) -> float:
        """Ask for the cancellation; return the seconds until the next poll."""
        remote_id = self._job.remote_id or self._job.hinted_id or ""
        log.info("Cancelling job %s of run %s", remote_id, self._job.run_id)
        try:
            await self._client.cancel(remote_id)
        except PollFailed as error:
            log.warning("Job %s cannot be cancelled yet: %s", remote_id, error)
            if error.retry_after is None:
                return pause
            return self._spread(min(max(pause, error.retry_after), LONGEST_RETRY_AFTER))
        except EndpointRefused as error:
            log.warning("RunPod refuses to cancel job %s: %s", remote_id, error)
            return REFUSED_PAUSE
        return pause

    async def _end(self, ended: JobEnded, report: PollReport) -> None:
        job, output = self._job, ended.output
        posted_for = await _call(lambda: remote_jobs.reasons_so_far(job.run_id))
        pages, reposts = page_results(job, ended, posted_for)
        # This replaces the message of a failed poll.
        columns = _reported_columns(report) | {"error_message": _end_message(ended)}
        if (confirmed := self._confirmed_id(report)) is not None:
            columns["remote_id"] = confirmed
        if output is not None and output.gauges is not None:
            columns["gauges"] = output.gauges.model_dump()
        if output is not None and output.debug:
            log.info("Handler log of a job of run %s: %s", job.run_id, " | ".join(output.debug))
        end = JobEnd(ended.outcome, pages, reposts, columns)
        await _call(lambda: remote_jobs.settle(job, end))
        log.info("A job of run %s ended: %s", job.run_id, ended.outcome)

    async def _forget_hint(self) -> None:
        hint = self._job.hinted_id
        if hint is not None:
            await _call(lambda: remote_jobs.forget_hint(self._job.id, hint))

    def _confirmed_id(self, report: PollReport) -> str | None:
        """The id from a webhook, once RunPod has answered for it; None if the post brought one."""
        confirmed = isinstance(report, JobReport) and self._job.remote_id is None
        return self._job.hinted_id if confirmed else None

    def _spread(self, seconds: float) -> float:
        """Return up to retry.jitter more, so that the polls do not all come at once."""
        return seconds * random.uniform(1, 1 + self._settings.retry.jitter)


def _mark_misconfigured(url: str, message: str) -> None:
    if server_state.mark_out(url, message, misconfigured=True):
        log.warning("RunPod refuses polls: %s", message)


def _poll_error(report: PollReport) -> str | None:
    """The message of a failed poll, empty after an answer, None if RunPod was not asked."""
    if isinstance(report, NoJobId):
        return None
    return report.message if isinstance(report, NoAnswer | KeyRefused) else ""


def _end_message(ended: JobEnded) -> str | None:
    if ended.error is None:
        return "Cancelled because its run had ended."
    return None if ended.outcome is JobOutcome.COMPLETED else ended.error.message


def _reported_columns(report: PollReport) -> dict[str, Any]:
    """Columns of the job's row with the values that RunPod reported."""
    if not isinstance(report, JobReport):
        return {}
    columns = {
        "last_status": report.word,
        "delay_ms": report.delay_ms,
        "execution_ms": report.execution_ms,
    }
    return {name: value for name, value in columns.items() if value is not None}


async def _call(function: Callable[[], T]) -> T:
    return await asyncio.to_thread(function)
