"""The parser `glmocr`: whole pages to an OpenAI-compatible OCR server, many in flight.

Made by the registry for the ocr worker. Each page is stored as it ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rag_service.errors import (
    Draining,
    OcrEmpty,
    OcrOutage,
    OcrRejected,
    PageError,
    RagServiceError,
)
from rag_service.ocr.budget import answer_budget
from rag_service.ocr.client import (
    ConnectionRefused,
    OcrClient,
    PageAnswer,
    Rejected,
    ServerFailed,
)
from rag_service.parsers.base import (
    PageResult,
    PageSink,
    PageSource,
    PageTask,
    PageWarning,
    ParseJob,
    ServerWatch,
)
from rag_service.pdf.types import RenderedPage
from rag_service.retry import TryAgain, page_schedule
from rag_service.settings import Settings
from rag_service.states import PageState

VERSION = "1"
# A truncated page is read once more with this much more room.
_MORE_ROOM = 4.0
_SMALLER = 2 / 3

Sleep = Callable[[float], Awaitable[None]]


class GlmOcr:
    """Reads pages through one OCR server."""

    name = "glmocr"
    version = VERSION

    def __init__(self, settings: Settings, *, sleep: Sleep = asyncio.sleep) -> None:
        self._settings = settings
        self._sleep = sleep
        chosen = settings.ocr.pages_in_flight
        self._in_flight = settings.ocr.auto_pages_in_flight if chosen == "auto" else chosen

    async def parse(
        self, job: ParseJob, source: PageSource, sink: PageSink, watch: ServerWatch
    ) -> None:
        """Read every page of the job. Raises OcrOutage, LeaseLost, Draining."""
        async with OcrClient(self._settings.ocr, connections=self._in_flight) as client:
            reading = _Reading(self._settings, client, job, source, sink, watch, self._sleep)
            await reading.all_pages(self._in_flight)


@dataclass(frozen=True, slots=True)
class _Server:
    engine: str | None
    max_model_len: int | None


class _Reading:
    """One run of the parser over one job."""

    def __init__(
        self,
        settings: Settings,
        client: OcrClient,
        job: ParseJob,
        source: PageSource,
        sink: PageSink,
        watch: ServerWatch,
        sleep: Sleep,
    ) -> None:
        self._settings = settings
        self._client = client
        self._job = job
        self._source = source
        self._sink = sink
        self._watch = watch
        self._sleep = sleep
        self._server = _Server(None, None)

    async def all_pages(self, in_flight: int) -> None:
        """Work through the pages, `in_flight` at a time; the first alone where the server was out."""
        waiting = deque(self._job.pages)
        if not waiting:
            return
        info = await self._client.model_info()
        self._server = _Server(info.owner, info.max_model_len)
        if not await self._watch.is_up():
            await self._page(waiting.popleft())
        places = [self._take_pages(waiting) for _ in range(min(in_flight, len(waiting)))]
        await _together(places)

    async def _take_pages(self, waiting: deque[PageTask]) -> None:
        while waiting:
            await self._page(waiting.popleft())

    async def _page(self, task: PageTask) -> None:
        await self._sink.in_hand(task.number)
        try:
            result = await self._read(task)
        except PageError as error:
            result = self._failed(task, error)
        await self._sink.store(result)

    async def _read(self, task: PageTask) -> PageResult:
        page = await self._source.render(task.number, self._job.dpi)
        try:
            answer = await self._request(page)
        except Rejected as error:
            if not error.for_size:
                raise OcrRejected(error.message) from error
            page, answer = await self._smaller(task, page)
        except (TryAgain, ServerFailed) as error:
            return self._later_or_failed(task, str(error))
        return await self._judge(task, page, answer)

    async def _smaller(self, task: PageTask, page: RenderedPage) -> tuple[RenderedPage, PageAnswer]:
        """The server found the picture too large: once more at two thirds of its sides."""
        smaller = await self._source.render(task.number, int(page.dpi * _SMALLER))
        try:
            return smaller, await self._request(smaller)
        except (Rejected, TryAgain, ServerFailed) as error:
            raise OcrRejected(f"{error} (also at {smaller.dpi:.0f} DPI)") from error

    async def _request(self, page: RenderedPage, room: float = 1.0) -> PageAnswer:
        """One answer, through the retry schedule. Raises OcrOutage where nothing was answered."""
        started = datetime.now(UTC)
        budget = answer_budget(
            page.width,
            page.height,
            ceiling=self._settings.ocr.max_tokens,
            max_model_len=self._server.max_model_len,
            room=room,
        )
        schedule = page_schedule(self._settings.retry, sleep=self._sleep)
        try:
            return await schedule(self._post, page, budget)
        except TryAgain as error:
            if not await self._watch.answered_since(started):
                raise OcrOutage(str(error)) from error
            raise

    async def _post(self, page: RenderedPage, max_tokens: int) -> PageAnswer:
        await self._sink.still_ours()
        try:
            answer = await self._client.read_page(page.jpeg, max_tokens=max_tokens)
        except ConnectionRefused as error:
            probe = await self._client.probe()
            if not probe.ok:
                raise OcrOutage(probe.message) from error
            raise
        await self._watch.answered()
        return answer

    async def _judge(self, task: PageTask, page: RenderedPage, answer: PageAnswer) -> PageResult:
        """What the answer is worth: text, cut text, or none on a page that has ink."""
        if answer.finish_reason == "length":
            answer = await self._better(page, answer, room=_MORE_ROOM)
        elif not answer.text.strip():
            answer = await self._better(page, answer, room=1.0)
        text = answer.text.strip()
        if answer.finish_reason == "length" and text:
            warning = PageWarning("page_truncated", "The text stops at the token limit.")
            return self._result(task, page, answer, PageState.TRUNCATED, warning)
        if text:
            return self._result(task, page, answer, PageState.OCR)
        if answer.finish_reason != "stop":
            raise OcrEmpty(f"No text, and the answer ended by {answer.finish_reason!r}.")
        warning = PageWarning("page_without_text", "Two readings found ink but no writing.")
        return self._result(task, page, answer, PageState.NO_TEXT, warning)

    async def _better(self, page: RenderedPage, first: PageAnswer, *, room: float) -> PageAnswer:
        """A second reading where the first was cut or empty; the first where that fails."""
        try:
            return await self._request(page, room)
        except (TryAgain, ServerFailed, Rejected):
            if not first.text.strip():
                raise OcrEmpty(
                    "The page has ink; one reading came back empty, one failed."
                ) from None
            return first

    def _result(
        self,
        task: PageTask,
        page: RenderedPage,
        answer: PageAnswer,
        state: PageState,
        *warnings: PageWarning,
    ) -> PageResult:
        return PageResult(
            number=task.number,
            state=state,
            markdown=answer.text.strip(),
            finish_reason=answer.finish_reason,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            seconds=answer.seconds,
            engine=self._server.engine,
            model=answer.model,
            dpi=page.dpi,
            warnings=[*(PageWarning(w.code, w.message) for w in page.warnings), *warnings],
        )

    def _later_or_failed(self, task: PageTask, message: str) -> PageResult:
        """A page that the server did not manage gets one later try."""
        if task.tries == 0:
            later = self._settings.retry.later_wait
            return PageResult(task.number, PageState.PENDING, retry_in=later)
        return self._failed(task, OcrRejected(f"The server did not read the page: {message}"))

    def _failed(self, task: PageTask, error: RagServiceError) -> PageResult:
        return PageResult(task.number, PageState.FAILED, error=error)


async def _together(work: Sequence[Awaitable[None]]) -> None:
    """Run all at once. A worker that drains lets the others end; any other error stops them."""
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
