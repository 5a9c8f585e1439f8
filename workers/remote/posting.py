"""A run whose pages are read by jobs on RunPod: posted once, followed for a while, left to others.

Used by the ocr worker where ocr.transport is `runpod`. Whatever crashes, the rows say which post
has which page; a fork that comes later goes on from them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from functools import partial
from itertools import count
from typing import Any

from rag_service.config.loader import get_settings
from rag_service.config.options import Settings
from rag_service.database.engine import DatabaseError, is_outage
from rag_service.errors import (
    Draining,
    LeaseLost,
    OcrMisconfigured,
    OcrOutage,
    PayloadTooLarge,
    RagServiceError,
)
from rag_service.jobs import leases, remote_jobs, run_pages, runs, server_state
from rag_service.jobs.remote_jobs import FreePages, JobRow, NewJob
from rag_service.jobs.run_pages import StoredPage
from rag_service.runpod.job_body import Envelope
from rag_service.runpod.job_rules import request_key, token_digest
from rag_service.runpod.payload import PageRefused, Payload, PayloadMaker
from rag_service.runpod.runpod_client import (
    BodyRefused,
    EndpointRefused,
    LostAnswer,
    NotAccepted,
    RunPodClient,
    Unreachable,
)
from rag_service.runtime.retry import TryAgain, page_schedule
from rag_service.states import JobState, PageState, PostReason
from workers.document_source import opened
from workers.remote.endpoint_watch import open_client, probe_endpoint
from workers.remote.polling import poll_due
from workers.run_guard import RunGuard

log = logging.getLogger(__name__)

_TICK_SECONDS = 1.0
# Tries, a second apart, to write down what RunPod answered.
_PATIENCE = 600


async def read_remotely(held: RunGuard) -> None:
    """Post what no job has, follow the jobs for a window, then finish or let go of the run.

    Raises OcrOutage where RunPod takes no job, LeaseLost.
    """
    await RemoteRun(held, get_settings()).work()


class RemoteRun:
    """One fork's time with a run."""

    def __init__(self, held: RunGuard, settings: Settings) -> None:
        self._held = held
        self._run = held.run
        self._settings = settings
        self._until = time.monotonic() + settings.runpod.poll_window
        # At the endpoint's limit of live jobs nothing is made before this moment.
        self._full_until = float("-inf")
        self._passed = False

    async def work(self) -> None:
        """Until the run is finished, or nothing is left to do for this fork."""
        await self._held.call(lambda: remote_jobs.note_interrupted(self._run))
        while not await self._turn():
            await asyncio.sleep(_TICK_SECONDS)

    async def _turn(self) -> bool:
        """One look at the run; True where the fork is done with it."""
        try:
            self._held.check_drain()
        except Draining:
            await self._let_go(0.0)
            return True
        await self._repeat_lost()
        if not await self._post_free():
            await self._pass_trial()
        await poll_due(self._settings, run_id=self._run.id)
        if not await self._held.call(lambda: run_pages.pending(self._run)):
            await self._held.call(lambda: runs.finish(self._run))
            return True
        now = time.monotonic()
        # With no job left, pages are free again: they are posted in the next turn.
        if now < self._until and (now >= self._full_until or await self._jobs()):
            return False
        await self._let_go(self._settings.runpod.poll_max)
        return True

    async def _let_go(self, pause: float) -> None:
        """To maintenance while jobs are live, else back to the queue."""
        if await self._jobs():
            await self._held.call(lambda: remote_jobs.leave_to_maintenance(self._run))
        else:
            await self._held.call(lambda: leases.release(self._run, retry_in=pause))

    async def _jobs(self) -> list[JobRow]:
        return await self._held.call(lambda: remote_jobs.jobs_of(self._run.id))

    async def _repeat_lost(self) -> None:
        """Free the pages of a lost post once it is safe to post the same again."""
        for job in await self._jobs():
            if job.state is JobState.LOST and self._may_repeat(job):
                await self._held.call(partial(remote_jobs.repeat, self._run, job.id))

    def _may_repeat(self, job: JobRow) -> bool:
        """Where the handler has a volume, two jobs of one key do the work once."""
        if job.hinted_id is not None:
            return False
        runpod = self._settings.runpod
        soon = runpod.handler_volume and (job.lost_for or 0.0) >= runpod.repost_after
        return soon or job.left <= 0

    async def _post_free(self) -> bool:
        """Post pages that no job has; whether there was anything to post, and room for it."""
        if time.monotonic() < self._full_until:
            return False
        if any(job.state is JobState.LOST for job in await self._jobs()):
            # What swallowed one post would swallow the next.
            return False
        free = await self._held.call(lambda: remote_jobs.free_pages(self._run))
        if not free:
            return False
        async with self._poster() as poster:
            for group in free:
                if not await poster.post(group):
                    break
        if poster.at_limit:
            self._full_until = time.monotonic() + self._settings.runpod.poll_max
        return not poster.at_limit

    async def _pass_trial(self) -> None:
        """A run that sends nothing cannot try the server for the others."""
        url = self._settings.page_server
        if not self._passed and url is not None:
            await self._held.call(lambda: server_state.end_trial(url, self._run.id))
        self._passed = True

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
            yield Poster(self._held, self._settings, client, maker)


class Poster:
    """Makes posts: each has its row before it goes out."""

    def __init__(
        self, held: RunGuard, settings: Settings, client: RunPodClient, maker: PayloadMaker
    ) -> None:
        self._held = held
        self._run = held.run
        self._settings = settings
        self._client = client
        self._maker = maker
        self._tokens: dict[tuple[int, ...], str] = {}
        # The endpoint has as many live jobs as it may have.
        self.at_limit = False

    async def post(self, free: FreePages) -> bool:
        """Post the pages in as many jobs as they need; False where posting must pause.

        Raises OcrOutage, LeaseLost, Draining.
        """
        again = free.reason is PostReason.LOST_ANSWER
        making = self._maker.make(free.numbers, self._envelope, as_before=again)
        async with aclosing(making) as payloads:
            async for made in payloads:
                if isinstance(made, PageRefused):
                    await self._fail([made.page], made.error)
                elif not await self._post(made, free.reason):
                    return False
        return True

    def _envelope(self, numbers: Sequence[int]) -> Envelope:
        """What goes around the pages of one job; its webhook carries a token of its own."""
        runpod, token = self._settings.runpod, secrets.token_urlsafe(32)
        self._tokens[tuple(numbers)] = token
        seconds = runpod.execution_timeout_base + runpod.execution_timeout_per_page * len(numbers)
        public = self._settings.api.public_url
        return Envelope(
            request_key=request_key(self._run.id, self._run.fingerprint, numbers),
            dpi=self._run.dpi,
            layout=self._run.layout,
            max_tokens=self._settings.ocr.max_tokens,
            execution_timeout_ms=int(seconds * 1000),
            ttl_ms=int(runpod.ttl * 1000),
            webhook=f"{public}/webhooks/runpod/{token}" if public else None,
        )

    async def _post(self, payload: Payload, reason: PostReason) -> bool:
        self._held.check_drain()
        if payload.warnings:
            warnings = [asdict(warning) for warning in payload.warnings]
            await self._held.call(partial(runs.add_warnings, self._run, warnings))
        job = self._row(payload, reason)
        most = self._settings.runpod.max_live_jobs
        job_id = await self._held.call(lambda: remote_jobs.open_job(self._run, job, most_live=most))
        if job_id is None:
            self.at_limit = True
            return False
        try:
            await self._send(payload, job_id)
        except BodyRefused as error:
            await self._surely(partial(remote_jobs.note_refused, job_id, error.message))
            await self._fail(payload.pages, PayloadTooLarge(f"RunPod refused it: {error.message}"))
        except LostAnswer as error:
            if reason is PostReason.LOST_ANSWER:
                raise OcrOutage(error.message) from error
            return False
        except (OcrOutage, LeaseLost, asyncio.CancelledError) as error:
            # What went out before this has been written down; what has not was never accepted.
            await self._surely(partial(remote_jobs.note_refused, job_id, str(error)))
            raise
        return True

    def _row(self, payload: Payload, reason: PostReason) -> NewJob:
        runpod = self._settings.runpod
        return NewJob(
            base_url=runpod.api_base,
            endpoint_id=str(runpod.endpoint_id),
            request_key=request_key(self._run.id, self._run.fingerprint, payload.pages),
            token_sha256=token_digest(self._tokens[payload.pages]),
            pages=payload.pages,
            reason=reason,
            ttl=runpod.ttl,
            usd_per_second=runpod.usd_per_gpu_second,
        )

    async def _send(self, payload: Payload, job_id: str) -> None:
        """Only a post that was certainly not accepted is made again."""
        schedule = page_schedule(self._settings.retry)
        try:
            await schedule(self._send_once, payload, job_id)
        except TryAgain as error:
            raise OcrOutage(str(error)) from error

    async def _send_once(self, payload: Payload, job_id: str) -> None:
        self._held.check()
        await self._held.call(lambda: leases.require_valid(self._run))
        await _to_its_end(self._run_and_keep(payload.body, job_id))

    async def _run_and_keep(self, body: bytes, job_id: str) -> None:
        """The id is kept whoever holds the run by now."""
        try:
            remote_id = await self._client.run(body)
        except Unreachable as error:
            await self._require_answer(error)
            raise TryAgain(error.message) from error
        except NotAccepted as error:
            raise TryAgain(error.message, error.retry_after) from error
        except EndpointRefused as error:
            raise OcrMisconfigured(error.message) from error
        except LostAnswer as error:
            await self._surely(partial(remote_jobs.note_lost, job_id, error.message))
            raise
        await self._surely(lambda: remote_jobs.store_remote_id(job_id, remote_id))
        await self._surely(lambda: server_state.mark_answered(self._client.url))
        log.info("Run %s: job %s posted", self._run.id, remote_id)

    async def _require_answer(self, refused: Unreachable) -> None:
        """Raises OcrOutage where RunPod does not answer at all: no schedule helps then."""
        probe = await probe_endpoint(self._settings.runpod)
        if not probe.ok:
            raise OcrOutage(probe.message) from refused

    async def _surely(self, write: Callable[[], object]) -> None:
        """Write what no other fork could know, through an outage of PostgreSQL too."""
        for tries in count(1):
            try:
                await asyncio.to_thread(write)
            except DatabaseError as error:
                if tries == _PATIENCE or not is_outage(error):
                    raise
                log.warning("PostgreSQL is away, an answer of RunPod waits for it: %s", error)
                await asyncio.sleep(_TICK_SECONDS)
            else:
                return

    async def _fail(self, numbers: Sequence[int], error: RagServiceError) -> None:
        for number in numbers:
            page = StoredPage(number, PageState.FAILED, "", {}, error=error)
            await self._held.call(partial(run_pages.store, self._run, page))


async def _to_its_end(post: Coroutine[Any, Any, None]) -> None:
    """A post that has begun is not broken off by a lost lease or a cancel: its id would be lost."""
    task = asyncio.create_task(post)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
