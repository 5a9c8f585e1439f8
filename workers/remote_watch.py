"""Looks at the RunPod endpoint itself: whether it takes jobs, whether anybody works on them.

Used by maintenance.
"""

from __future__ import annotations

import asyncio
import logging

from rag_service.knowledgebase import remote_jobs, servers
from rag_service.ocr.client import Probe
from rag_service.runpod.client import EndpointRefused, PollFailed, RunPodClient
from rag_service.settings import RunPod, Settings

log = logging.getLogger(__name__)

NO_GPU_WORKERS = "no_gpu_workers"


async def probe_endpoint(settings: RunPod) -> Probe:
    """Whether RunPod answers for the endpoint with our key."""
    try:
        async with _client(settings) as client:
            await client.health()
    except EndpointRefused as error:
        return Probe(False, misconfigured=True, message=error.message)
    except PollFailed as error:
        return Probe(False, message=error.message)
    return Probe(True)


async def watch_queue(settings: Settings) -> None:
    """Raise or clear the alarm: jobs have queued for long and the endpoint has no worker.

    RunPod takes the workers of an endpoint away that has been idle for some days.
    """
    runpod = settings.runpod
    endpoint = (runpod.api_base, str(runpod.endpoint_id))
    waits = await asyncio.to_thread(remote_jobs.queued_for_long, endpoint, runpod.no_worker_alarm)
    alarm = None
    if waits and not await _has_workers(runpod):
        alarm = (
            f"{NO_GPU_WORKERS}: jobs have queued for over {runpod.no_worker_alarm:.0f} s and the "
            "endpoint has no worker. Look at its maximum of workers on RunPod."
        )
        log.warning("%s", alarm)
    url = settings.page_server
    if url is not None:
        await asyncio.to_thread(servers.set_alarm, url, alarm)


async def _has_workers(settings: RunPod) -> bool:
    try:
        async with _client(settings) as client:
            return (await client.health()).has_workers
    except (PollFailed, EndpointRefused) as error:
        log.info("The endpoint's health is not known: %s", error)
        return True


def _client(settings: RunPod) -> RunPodClient:
    return RunPodClient(settings, base_url=settings.api_base, endpoint_id=str(settings.endpoint_id))
