"""The parser `glmocr`: reads pages through an OpenAI-compatible OCR server, many in flight.

Each page is stored as soon as it is done.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from rag_service.config.options import Settings
from rag_service.errors import (
    Draining,
    LayoutUnavailable,
    OcrEmpty,
    OcrFailed,
    OcrRejected,
    OcrRepetition,
    PageError,
    RagServiceError,
)
from rag_service.layout.layout_client import LayoutClient
from rag_service.ocr.concurrency.limiter import Limiter, limiter_for
from rag_service.ocr.concurrency.tuning import TUNING
from rag_service.ocr.ocr_client import OcrClient, Rejected, ServerFailed
from rag_service.parsers.answer_reader import PictureReader
from rag_service.parsers.contract import (
    PageResult,
    PageSink,
    PageSource,
    PageTask,
    ParseJob,
    ServerWatch,
)
from rag_service.parsers.page_reader import PageReader
from rag_service.parsers.page_request import PageInProgress, PageRequester, Sleep
from rag_service.parsers.region_reader import LayoutFinder, RegionReader
from rag_service.parsers.server_proof import ServerProof
from rag_service.runtime.retry import TryAgain
from rag_service.states import PageState

VERSION = "2"

# What the server's answers, or their lack, end a page with.
_SERVER_ERRORS = (Rejected, ServerFailed, TryAgain, OcrEmpty, OcrRepetition)
_READING_ERRORS = (*_SERVER_ERRORS, PageError)


class GlmOcr:
    """Reads pages through one OCR server."""

    name = "glmocr"
    version = VERSION

    def __init__(
        self,
        settings: Settings,
        *,
        sleep: Sleep = asyncio.sleep,
        open_layout: Callable[[Settings], AbstractAsyncContextManager[LayoutFinder]] = LayoutClient,
    ) -> None:
        self._settings = settings
        self._sleep = sleep
        self._open_layout = open_layout

    async def parse(
        self, job: ParseJob, source: PageSource, sink: PageSink, watch: ServerWatch
    ) -> None:
        """Read every page of the job. Raises OcrOutage, LeaseLost, Draining."""
        settings = self._settings
        limiter = limiter_for(
            settings, start=await watch.good_limit(), processes=await watch.processes()
        )
        async with (
            OcrClient(settings.ocr, connections=int(TUNING.most)) as client,
            self._open_layout(settings) as layout,
            limiter.at_work(client.gauges, watch.report),
        ):
            requester = PageRequester(settings, client, sink, watch, limiter, sleep=self._sleep)
            reader = PictureReader(requester)
            regions = RegionReader(settings.layout, layout, source, reader, job.dpi)
            pages = PageReader(source, reader, regions, mode=job.layout, dpi=job.dpi)
            proof = ServerProof(requester, watch, job.dpi)
            flow = _PageFlow(settings, requester, pages, proof, sink, watch, limiter)
            await flow.read_all(job.pages)


class _PageFlow:
    """Takes the pages of one job from waiting to stored."""

    def __init__(
        self,
        settings: Settings,
        requester: PageRequester,
        pages: PageReader,
        proof: ServerProof,
        sink: PageSink,
        watch: ServerWatch,
        limiter: Limiter,
    ) -> None:
        self._limiter = limiter
        self._later_wait = settings.retry.later_wait
        self._requester = requester
        self._pages = pages
        self._proof = proof
        self._sink = sink
        self._watch = watch

    async def read_all(self, tasks: Sequence[PageTask]) -> None:
        """Read the pages in their order; one at a time while the server does not answer."""
        waiting = deque(tasks)
        if not waiting:
            return
        await self._requester.fetch_model_info()
        while waiting and not await self._watch.is_up():
            await self._page(waiting.popleft())
        await _run_all([self._limited_page(task) for task in waiting])

    async def _limited_page(self, task: PageTask) -> None:
        async with self._limiter.page():
            await self._page(task)

    async def _page(self, task: PageTask) -> None:
        await self._sink.begin_page(task.number)
        page = PageInProgress(task)
        try:
            result = replace(await self._pages.read(page), engine=self._requester.engine)
            is_doubtful = _is_doubtful(page, result)
        except _READING_ERRORS as error:
            result = self._failure(task, error)
            is_doubtful = isinstance(error, _SERVER_ERRORS)
        if is_doubtful and not await self._proof.is_page_at_fault(page) and task.tries == 0:
            result = self._later(task)
        await self._sink.store(result)

    def _failure(self, task: PageTask, error: Exception) -> PageResult:
        """Return the result of a page that was not read; some errors allow one later try."""
        match error:
            case Rejected():
                return _failed(task, OcrRejected(error.message))
            case PageError() if not isinstance(error, LayoutUnavailable):
                return _failed(task, error)
            case _ if task.tries == 0:
                return self._later(task)
            case LayoutUnavailable():
                return _failed(task, error)
        return _failed(task, OcrFailed(f"The OCR server did not read the page: {error}"))

    def _later(self, task: PageTask) -> PageResult:
        return PageResult(task.number, PageState.PENDING, retry_in=self._later_wait)


def _is_doubtful(page: PageInProgress, result: PageResult) -> bool:
    """Return whether a server that reads nothing could have given this result."""
    return result.state is PageState.NO_TEXT or page.refused


def _failed(task: PageTask, error: RagServiceError) -> PageResult:
    return PageResult(task.number, PageState.FAILED, error=error)


async def _run_all(work: Sequence[Awaitable[None]]) -> None:
    """Run all at once. After Draining the others finish; any other error cancels them."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        pending = set(tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                error = task.exception()
                if error is not None and not isinstance(error, Draining):
                    raise error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if isinstance(task.exception(), Draining):
            raise Draining()
