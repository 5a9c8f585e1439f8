"""Make posts and carry out what `runpod.decisions` decides about their answers.

Each post has its row before it is sent, and its answer is stored even if the lease is lost.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar, assert_never

from rag_service.config.options import Settings
from rag_service.database.engine import DatabaseError, is_outage
from rag_service.errors import (
    LeaseLost,
    OcrMisconfigured,
    OcrOutage,
    PayloadTooLarge,
    RagServiceError,
    RemoteResultMissing,
)
from rag_service.jobs import leases, remote_posts, run_pages, runs, server_state
from rag_service.jobs.remote_posts import FreePages, NewJob
from rag_service.jobs.run_pages import StoredPage
from rag_service.runpod.decisions import (
    AnswerLost,
    EndpointMisconfigured,
    JobAccepted,
    PostAgain,
    PostAnswer,
    PostOutcome,
    PostRefused,
    decide_post,
)
from rag_service.runpod.job_body import Envelope
from rag_service.runpod.job_keys import request_key, token_digest
from rag_service.runpod.payload import PageRefused, Payload, PayloadMaker
from rag_service.runpod.runpod_client import (
    BodyRefused,
    EndpointRefused,
    LostAnswer,
    NotAccepted,
    RunPodClient,
)
from rag_service.runtime.retry import TryAgain, page_schedule
from rag_service.states import PageState, PostReason
from workers.remote.endpoint_watch import probe_endpoint
from workers.run_guard import RunGuard

log = logging.getLogger(__name__)

T = TypeVar("T")
_DATABASE_RETRY_SECONDS = 1.0
# Tries to write RunPod's answer while PostgreSQL is unreachable: 10 minutes.
_DATABASE_TRIES = 600


@dataclass(frozen=True, slots=True)
class OpenPost:
    """A post whose row is committed."""

    job_id: str
    payload: Payload
    reason: PostReason


class Poster:
    """The posts of one run."""

    def __init__(
        self, guard: RunGuard, settings: Settings, client: RunPodClient, maker: PayloadMaker
    ) -> None:
        self._guard = guard
        self._run = guard.run
        self._settings = settings
        self._client = client
        self._maker = maker
        self._tokens: dict[tuple[int, ...], str] = {}
        # The endpoint has as many live jobs as runpod.max_live_jobs allows.
        self.at_limit = False

    async def post(self, free: FreePages) -> bool:
        """Post the pages in as many jobs as they need; return False if posting must pause.

        Raises OcrOutage, LeaseLost, Draining.
        """
        making = self._maker.make(free.numbers, self._envelope, as_before=free.as_before)
        async with aclosing(making) as payloads:
            async for made in payloads:
                if isinstance(made, PageRefused):
                    await self._fail([made.page], made.error)
                elif not await self._post(made, free.reason):
                    return False
        return True

    def _envelope(self, numbers: Sequence[int]) -> Envelope:
        """Return what surrounds the pages of one job; its webhook has a token of its own."""
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
        """Post one job; return False if posting must pause."""
        self._guard.check_drain()
        if payload.warnings:
            warnings = [asdict(warning) for warning in payload.warnings]
            await self._guard.call(partial(runs.add_warnings, self._run, warnings))
        job, limit = self._new_job(payload, reason), self._settings.runpod.max_live_jobs
        job_id = await self._guard.call(
            lambda: remote_posts.open_job(self._run, job, max_live=limit)
        )
        if job_id is None:
            self.at_limit = True
            return False
        try:
            return await self._send(OpenPost(job_id, payload, reason))
        except (OcrOutage, LeaseLost, asyncio.CancelledError) as error:
            # An answer has been written down by now; a post without one was never accepted.
            await self._write(partial(remote_posts.note_refused, job_id, str(error)))
            raise

    def _new_job(self, payload: Payload, reason: PostReason) -> NewJob:
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

    async def _send(self, post: OpenPost) -> bool:
        """Send a post by the retry schedule; return False if posting must pause.

        Raises OcrOutage, LeaseLost. Only a post that was certainly not accepted is sent again.
        """
        schedule = page_schedule(self._settings.retry)
        try:
            go_on: bool = await schedule(self._send_once, post)
        except TryAgain as error:
            raise OcrOutage(str(error)) from error
        return go_on

    async def _send_once(self, post: OpenPost) -> bool:
        self._guard.check()
        await self._guard.call(lambda: leases.require_valid(self._run))
        return await _to_its_end(self._ask_and_apply(post))

    async def _ask_and_apply(self, post: OpenPost) -> bool:
        answer = await self._ask(post.payload.body)
        return await self._apply(post, decide_post(answer, post.reason))

    async def _ask(self, body: bytes) -> PostAnswer:
        try:
            return await self._client.run(body)
        except (NotAccepted, LostAnswer, EndpointRefused, BodyRefused) as error:
            return error

    async def _apply(self, post: OpenPost, outcome: PostOutcome) -> bool:
        """Write the outcome of a post; return False if posting must pause.

        Raises TryAgain if the same post is to be sent again, OcrOutage if the run has to wait.
        """
        match outcome:
            case JobAccepted(remote_id):
                # The id is stored even if the lease was lost meanwhile.
                await self._write(lambda: remote_posts.store_remote_id(post.job_id, remote_id))
                await self._write(lambda: server_state.mark_answered(self._client.url))
                log.info("Run %s: job %s posted", self._run.id, remote_id)
                return True
            case PostAgain():
                if outcome.probe_first:
                    await self._require_answer()
                raise TryAgain(outcome.message, outcome.retry_after)
            case AnswerLost(message):
                await self._write(lambda: remote_posts.note_lost(post.job_id, message))
                if outcome.again:
                    url = self._client.url
                    await self._write(
                        lambda: server_state.mark_out(url, message, misconfigured=False)
                    )
                return False
            case PostRefused(message):
                await self._write(lambda: remote_posts.note_refused(post.job_id, message))
                refused = PayloadTooLarge(f"RunPod refused the job's body: {message}")
                await self._fail(post.payload.pages, refused)
                return True
            case EndpointMisconfigured(message):
                raise OcrMisconfigured(message)
            case _:
                assert_never(outcome)

    async def _require_answer(self) -> None:
        """Raise OcrOutage if RunPod does not answer at all: no retry helps then."""
        probe = await probe_endpoint(self._settings.runpod)
        if not probe.ok:
            raise OcrOutage(probe.message)

    async def _write(self, write: Callable[[], object]) -> None:
        """Write what only this fork knows, and wait for PostgreSQL if it is unreachable."""
        for tries in count(1):
            try:
                await asyncio.to_thread(write)
            except DatabaseError as error:
                if tries == _DATABASE_TRIES or not is_outage(error):
                    raise
                log.warning("PostgreSQL error, an answer of RunPod is not stored yet: %s", error)
                await asyncio.sleep(_DATABASE_RETRY_SECONDS)
            else:
                return

    async def fail_exhausted(self) -> None:
        """Fail the pages that were posted as often as runpod.max_posts_per_page allows."""
        limit = self._settings.runpod.max_posts_per_page
        posts = await self._guard.call(lambda: remote_posts.exhausted_pages(self._run, limit))
        for number, reasons in posts.items():
            listed = ", ".join(reasons)
            error = RemoteResultMissing(
                f"The page was posted {len(reasons)} times without a usable result ({listed}); "
                "runpod.max_posts_per_page allows no more."
            )
            await self._fail([number], error)

    async def _fail(self, numbers: Sequence[int], error: RagServiceError) -> None:
        for number in numbers:
            page = StoredPage(number, PageState.FAILED, "", {}, error=error)
            await self._guard.call(partial(run_pages.store, self._run, page))


async def _to_its_end(post: Coroutine[Any, Any, T]) -> T:
    """Await a post that no lost lease or cancel interrupts: its job's id would be lost."""
    task = asyncio.create_task(post)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
