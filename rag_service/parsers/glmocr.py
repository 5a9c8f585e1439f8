"""The parser `glmocr`: whole pages to an OpenAI-compatible OCR server, many in flight.

Made by the registry for the ocr worker. Each page is stored as it ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

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
    RejectedForSize,
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
        """Work through the pages, `in_flight` at a time; one by one while the server is out."""
        waiting = deque(self._job.pages)
        if not waiting:
            return
        info = await self._client.model_info()
        self._server = _Server(info.owner, info.max_model_len)
        while waiting and not await self._watch.is_up():
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
            return await self._read_picture(task, page)
        except Rejected as error:
            raise OcrRejected(error.message) from error
        except (TryAgain, ServerFailed) as error:
            return self._later_or_failed(task, str(error))

    async def _read_picture(self, task: PageTask, page: RenderedPage) -> PageResult:
        """Once more at two thirds of its sides where the server finds the picture too large."""
        try:
            return await self._judge(task, page, await self._request(task, page))
        except RejectedForSize:
            smaller = await self._source.render(task.number, int(page.dpi * _SMALLER))
            return await self._judge(task, smaller, await self._request(task, smaller))

    async def _request(self, task: PageTask, page: RenderedPage, room: float = 1.0) -> PageAnswer:
        """One answer, through the retry schedule. Raises OcrOutage where nothing was answered."""
        before = await self._watch.last_answer()
        schedule = page_schedule(self._settings.retry, sleep=self._sleep)
        try:
            return await schedule(self._post, page, self._budget(page, room))
        except TryAgain as error:
            answered = await self._watch.last_answer() != before
            if not answered and not await self._page_is_at_fault(task):
                raise OcrOutage(str(error)) from error
            raise

    def _budget(self, page: RenderedPage, room: float) -> int:
        return answer_budget(
            page.width,
            page.height,
            ceiling=self._settings.ocr.max_tokens,
            max_model_len=self._server.max_model_len,
            room=room,
        )

    async def _page_is_at_fault(self, task: PageTask) -> bool:
        """Whether a silent server is told from a page that silences it.

        On its later try others were answered while it was not, and the server says it is well.
        """
        return task.tries > 0 and (await self._client.probe()).ok

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

    async def _judge(self, task: PageTask, page: RenderedPage, first: PageAnswer) -> PageResult:
        """What the answer is worth: text, cut text, or none on a page that has ink."""
        answer = await self._better(task, page, first)
        if has_writing(answer.text):
            if answer.finish_reason == "stop":
                return self._result(task, page, answer, PageState.OCR)
            warning = PageWarning("page_truncated", "The text stops at the token limit.")
            return self._result(task, page, answer, PageState.TRUNCATED, warning)
        if (first.finish_reason, answer.finish_reason) != ("stop", "stop"):
            raise OcrEmpty("Two readings found ink and came back without text, cut by their limit.")
        warning = PageWarning("page_without_text", "Two readings found ink but no writing.")
        return self._result(task, page, answer, PageState.NO_TEXT, warning)

    async def _better(self, task: PageTask, page: RenderedPage, first: PageAnswer) -> PageAnswer:
        """The reading itself where it is whole; a second one where it was cut or empty.

        The cut one is kept where there is no more room or the second brings nothing.
        """
        room = _MORE_ROOM if first.finish_reason == "length" else 1.0
        if not has_writing(first.text):
            return await self._request(task, page, room)
        if self._budget(page, room) == self._budget(page, 1.0):
            return first
        try:
            second = await self._request(task, page, room)
        except (TryAgain, ServerFailed, Rejected):
            return first
        return second if has_writing(second.text) else first

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


def has_writing(text: str) -> bool:
    """Whether anything would be seen of the text on paper."""
    return any(character.isprintable() and character != " " for character in text)
