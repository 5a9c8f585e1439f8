"""A run whose pages are read by jobs on RunPod: post each page once, follow the jobs for a while,
then leave them to maintenance. After any crash the rows say which post has which page.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from rag_service.config.loader import get_settings
from rag_service.config.options import Settings
from rag_service.errors import Draining
from rag_service.jobs import leases, remote_jobs, remote_posts, run_pages, runs, server_state
from rag_service.jobs.remote_jobs import JobRow
from rag_service.runpod.decisions import may_repost_lost
from rag_service.runpod.payload import PayloadMaker
from rag_service.states import JobState, PostReason, RunState
from workers.document_source import opened
from workers.remote.endpoint_watch import open_client
from workers.remote.polling import poll_due
from workers.remote.posting import Poster
from workers.run_guard import RunGuard

_TICK_SECONDS = 1.0


async def read_remotely(guard: RunGuard) -> RunState:
    """Post the pages that no job has, follow the jobs for a window, then finish or release the run.

    Raises OcrOutage if RunPod accepts no job, LeaseLost.
    """
    return await RemoteRun(guard, get_settings()).work()


class RemoteRun:
    """The work of one fork on a run."""

    def __init__(self, guard: RunGuard, settings: Settings) -> None:
        self._guard = guard
        self._run = guard.run
        self._settings = settings
        self._until = time.monotonic() + settings.runpod.poll_window
        # Until then nothing is posted: the endpoint had as many live jobs as allowed.
        self._full_until = float("-inf")
        self._passed_trial = False

    async def work(self) -> RunState:
        """Work until the run is finished or this fork has nothing left to do for it."""
        await self._guard.call(lambda: remote_posts.note_interrupted(self._run))
        while (left_in := await self._step()) is None:
            await asyncio.sleep(_TICK_SECONDS)
        return left_in

    async def _step(self) -> RunState | None:
        """Post and poll what is due; return the run's state if it was finished or released."""
        try:
            self._guard.check_drain()
        except Draining:
            return await self._release(0.0)
        await self._free_lost()
        if not await self._post_free():
            await self._pass_trial()
        await poll_due(self._settings, run_id=self._run.id)
        if not await self._guard.call(lambda: run_pages.pending(self._run)):
            return await self._guard.call(lambda: runs.finish(self._run))
        now = time.monotonic()
        if await self._waits_for_lost():
            return await self._release(0.0)
        # If no job is left, the pages are free again: the next step posts them.
        if now < self._until and (now >= self._full_until or await self._jobs()):
            return None
        return await self._release(self._settings.runpod.poll_max)

    async def _release(self, pause: float) -> RunState:
        """Leave the run to maintenance while jobs are live, else put it back into the queue."""
        if await self._jobs():
            return await self._guard.call(lambda: remote_jobs.leave_to_maintenance(self._run))
        await self._guard.call(lambda: leases.release(self._run, retry_in=pause))
        return RunState.READY

    async def _jobs(self) -> list[JobRow]:
        return await self._guard.call(lambda: remote_jobs.jobs_of(self._run.id))

    async def _free_lost(self) -> None:
        """Free the pages of lost posts that may be posted again."""
        for job in await self._jobs():
            if job.state is JobState.LOST and may_repost_lost(job, self._settings.runpod):
                await self._guard.call(partial(remote_posts.free_lost, self._run, job.id))

    async def _waits_for_lost(self) -> bool:
        """Return whether only a webhook or the end of a ttl can bring the run on."""
        jobs = await self._jobs()
        may_not = [
            job.state is JobState.LOST and job.reason is PostReason.LOST_ANSWER for job in jobs
        ]
        return bool(jobs) and all(may_not)

    async def _post_free(self) -> bool:
        """Post the pages that no job has; return False if there are none or none may be posted."""
        if time.monotonic() < self._full_until:
            return False
        if any(job.state is JobState.LOST for job in await self._jobs()):
            # The next post's answer would probably be lost too.
            return False
        free = await self._guard.call(lambda: remote_posts.free_pages(self._run))
        if not free:
            return False
        async with self._poster() as poster:
            await poster.fail_exhausted()
            free = await self._guard.call(lambda: remote_posts.free_pages(self._run))
            for group in free:
                if not await poster.post(group):
                    break
        if poster.at_limit:
            self._full_until = time.monotonic() + self._settings.runpod.poll_max
        return not poster.at_limit

    async def _pass_trial(self) -> None:
        """Leave the trial of the server to another run: this one sends nothing."""
        url = self._settings.page_server
        if not self._passed_trial and url is not None:
            await self._guard.call(lambda: server_state.end_trial(url, self._run.id))
        self._passed_trial = True

    @asynccontextmanager
    async def _poster(self) -> AsyncIterator[Poster]:
        async with open_client(self._settings.runpod) as client, opened(self._run) as document:
            maker = PayloadMaker(
                self._settings,
                document.pdf,
                document.path,
                self._run.media_type,
                self._run.filename,
            )
            yield Poster(self._guard, self._settings, client, maker)
