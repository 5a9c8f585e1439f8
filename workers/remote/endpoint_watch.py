"""Watch the RunPod endpoint: whether it answers and whether it has workers for its jobs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from rag_service.config.options import RunPodOptions, Settings
from rag_service.errors import ConfigurationError
from rag_service.jobs import remote_endpoints, server_state
from rag_service.jobs.remote_endpoints import LiveJobs
from rag_service.ocr.ocr_client import Probe
from rag_service.runpod.runpod_client import (
    EndpointHealth,
    EndpointRefused,
    PollFailed,
    RunPodClient,
)
from rag_service.runtime.plural import counted

log = logging.getLogger(__name__)

NO_GPU_WORKERS = "no_gpu_workers"
LOST_ANSWERS = "lost_answers"
# Checks in a row without any answer until RunPod counts as unreachable.
_SILENT_CHECKS = 3


async def probe_endpoint(settings: RunPodOptions) -> Probe:
    """Ask RunPod for the endpoint's health with the configured key."""
    try:
        async with open_client(settings) as client:
            await client.health()
    except (EndpointRefused, ConfigurationError) as error:
        return Probe(False, misconfigured=True, message=error.message)
    except PollFailed as error:
        return Probe(False, message=error.message)
    return Probe(True)


def open_client(settings: RunPodOptions) -> RunPodClient:
    """Return a client of the endpoint in the settings. Raises ConfigurationError."""
    return RunPodClient(settings, base_url=settings.api_base, endpoint_id=str(settings.endpoint_id))


class EndpointWatch:
    """The endpoint's alarms, raised and cleared while jobs are live on it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._checked_at = float("-inf")
        self._silent = 0

    async def check(self) -> None:
        """Check the endpoint once every ocr.probe_interval, and only while jobs are live."""
        url, now = self._settings.page_server, time.monotonic()
        if url is None or now - self._checked_at < self._settings.ocr.probe_interval:
            return
        self._checked_at = now
        record = await asyncio.to_thread(server_state.get, url)
        before: Mapping[str, str] = record.alarms if record else {}
        alarms = await self._alarms(before)
        if alarms != before:
            await asyncio.to_thread(server_state.set_alarms, url, alarms)
        _log_changes(before, alarms)

    async def _alarms(self, before: Mapping[str, str]) -> dict[str, str]:
        """Return the current alarms; an alarm that cannot be checked stays as it was."""
        runpod = self._settings.runpod
        jobs = await asyncio.to_thread(
            remote_endpoints.live_jobs,
            runpod.api_base,
            str(runpod.endpoint_id),
            long=runpod.no_worker_alarm,
        )
        found = {LOST_ANSWERS: _lost_answers(jobs)}
        if not jobs.number:
            self._silent = 0
        else:
            health, message = await _health(runpod)
            found |= {
                server_state.FAULT: self._unreachable(jobs, message),
                NO_GPU_WORKERS: self._without_workers(jobs, health, before.get(NO_GPU_WORKERS)),
            }
        return {name: message for name, message in found.items() if message is not None}

    def _unreachable(self, jobs: LiveJobs, message: str | None) -> str | None:
        """Return an alarm if RunPod has answered neither polls nor health checks for some time."""
        silence = None if jobs.answered else jobs.poll_error or message
        self._silent = self._silent + 1 if silence else 0
        return f"down: {silence}" if self._silent >= _SILENT_CHECKS else None

    def _without_workers(
        self, jobs: LiveJobs, health: EndpointHealth | None, before: str | None
    ) -> str | None:
        """Return an alarm if jobs wait and the endpoint has no worker.

        RunPod lowers the maximum number of workers of an endpoint that is idle for days.
        """
        if not jobs.queued_for_long:
            return None
        if health is None:
            return before
        if health.has_workers:
            return None
        return (
            f"Jobs have been queued for over {self._settings.runpod.no_worker_alarm:.0f} s and the "
            "endpoint has no worker. Check its maximum number of workers on RunPod."
        )


def _lost_answers(jobs: LiveJobs) -> str | None:
    """Return an alarm while RunPod may have jobs whose ids are not known."""
    if not jobs.lost:
        return None
    what = f"RunPod's answers to {counted(jobs.lost, 'post')} were lost ({jobs.lost_message})."
    if not jobs.lost_again:
        return f"{what} Their pages are posted again, one time, after runpod.repost_after."
    return (
        f"{what} {jobs.lost_again} of them repeated a lost post: their pages are not posted again "
        "until the webhook or the end of runpod.ttl has decided. Check what is between this "
        "service and RunPod, a proxy for example."
    )


async def _health(settings: RunPodOptions) -> tuple[EndpointHealth | None, str | None]:
    """Return the endpoint's health, or the reason why RunPod gave no answer.

    A refused key is an answer; posts and polls record it.
    """
    try:
        async with open_client(settings) as client:
            return await client.health(), None
    except PollFailed as error:
        return None, error.message
    except EndpointRefused as error:
        log.info("RunPod refuses to report the endpoint's health: %s", error)
        return None, None


def _log_changes(before: Mapping[str, str], alarms: Mapping[str, str]) -> None:
    for name in alarms.keys() - before.keys():
        log.warning("%s: %s", name, alarms[name])
    for name in before.keys() - alarms.keys():
        log.info("%s: the alarm is over.", name)
