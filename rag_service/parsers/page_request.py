"""One request about one picture: retry schedule, cause of a missing answer, tokens, time."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rag_service.config.options import Settings
from rag_service.errors import OcrOutage
from rag_service.ocr.concurrency.limiter import Limiter
from rag_service.ocr.ocr_client import ConnectionRefused, OcrClient, PageAnswer
from rag_service.ocr.token_budget import answer_budget
from rag_service.parsers.contract import PageSink, PageTask, ServerWatch
from rag_service.pdf.results import PdfWarning
from rag_service.runtime.retry import TryAgain, page_schedule

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class PagePart:
    """A JPEG of width x height pixels: a whole page or a region of it."""

    jpeg: bytes
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class PageQuestion:
    """The prompt for a picture. `token_factor` multiplies the tokens that its area allows."""

    prompt: str
    token_factor: float = 1.0
    warm: bool = False


class PageInProgress:
    """A page that is being read: what is known about it, and the tokens and time used so far.

    `refused`: an answer reads like a refusal. `pixels`: of the picture that was sent last.
    """

    def __init__(self, task: PageTask) -> None:
        self.number = task.number
        self.tries = task.tries
        self.dpi: float | None = None
        self.warnings: tuple[PdfWarning, ...] = ()
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.model: str | None = None
        self.refused = False
        self.pixels = 0
        self._silence: Silence | None = None
        self._started: float | None = None
        self._ended = 0.0

    def note_render(self, dpi: float, warnings: tuple[PdfWarning, ...]) -> None:
        """Note the resolution and the warnings of the page's picture."""
        self.dpi, self.warnings = dpi, warnings

    def note_request(self, picture: PagePart, silence: Silence) -> None:
        """Note that a request for the page is sent."""
        if self._started is None:
            self._started, self._silence = time.monotonic(), silence
        self.pixels = picture.width * picture.height

    async def others_were_read(self) -> bool:
        """Return whether the server has read a page well since the first request for this one."""
        return self._silence is not None and not await self._silence.lasts()

    def note_answer(self, answer: PageAnswer) -> None:
        """Note the model and the tokens of an answer."""
        self._ended = time.monotonic()
        self.model = answer.model
        self.prompt_tokens = _sum(self.prompt_tokens, answer.prompt_tokens)
        self.completion_tokens = _sum(self.completion_tokens, answer.completion_tokens)

    @property
    def seconds(self) -> float | None:
        """Seconds from the page's first request to its last answer."""
        return None if self._started is None else round(max(0.0, self._ended - self._started), 3)


class PageRequester:
    """Sends all requests of one job, each through the process's limiter."""

    def __init__(
        self,
        settings: Settings,
        client: OcrClient,
        sink: PageSink,
        watch: ServerWatch,
        limiter: Limiter,
        *,
        sleep: Sleep,
    ) -> None:
        self._settings = settings
        self._client = client
        self._sink = sink
        self._watch = watch
        self._sleep = sleep
        self._limiter = limiter
        self.engine: str | None = None
        self._max_model_len: int | None = None

    async def fetch_model_info(self) -> None:
        """Ask the server which engine serves the model and how long its context is."""
        info = await self._client.model_info()
        self.engine, self._max_model_len = info.owner, info.max_model_len

    async def ask(
        self, page: PageInProgress, picture: PagePart, question: PageQuestion
    ) -> PageAnswer:
        """Return one answer, through the retry schedule.

        Raises OcrOutage if the server read nothing well meanwhile; TryAgain, Rejected,
        ServerFailed, LeaseLost.
        """
        silence = Silence(self._watch)
        schedule = page_schedule(self._settings.retry, sleep=self._sleep)
        try:
            return await schedule(self._post, page, picture, question, silence)
        except TryAgain as error:
            if await silence.lasts() and not await self._page_is_at_fault(page):
                raise OcrOutage(str(error)) from error
            raise

    async def ask_once(self, picture: PagePart, question: PageQuestion) -> PageAnswer:
        """Return one answer to one request beside the limiter's.

        Raises OcrOutage, TryAgain, Rejected, ServerFailed, LeaseLost.
        """
        await self._sink.require_lease()
        return await self._read(picture, question)

    async def note_read(self) -> None:
        """Note that the server has read a picture: it works."""
        await self._watch.answered()

    def budget(self, picture: PagePart, token_factor: float) -> int:
        """Return the tokens that an answer about the picture may have."""
        return answer_budget(
            picture.width,
            picture.height,
            ceiling=self._settings.ocr.max_tokens,
            max_model_len=self._max_model_len,
            token_factor=token_factor,
        )

    async def _page_is_at_fault(self, page: PageInProgress) -> bool:
        """Return whether the page, not the server, is the cause of the missing answer.

        It is on the page's later try, if the server's probe succeeds.
        """
        return page.tries > 0 and (await self._client.probe()).ok

    async def _post(
        self, page: PageInProgress, picture: PagePart, question: PageQuestion, silence: Silence
    ) -> PageAnswer:
        async with self._limiter.request():
            await silence.begin()
            await self._sink.require_lease()
            page.note_request(picture, silence)
            answer = await self._read(picture, question)
        page.note_answer(answer)
        return answer

    async def _read(self, picture: PagePart, question: PageQuestion) -> PageAnswer:
        try:
            return await self._client.read(
                picture.jpeg,
                prompt=question.prompt,
                max_tokens=self.budget(picture, question.token_factor),
                warm=question.warm,
            )
        except ConnectionRefused as error:
            probe = await self._client.probe()
            if not probe.ok:
                raise OcrOutage(probe.message) from error
            raise


class Silence:
    """Whether the server read no page of any process well since the first request was sent."""

    def __init__(self, watch: ServerWatch) -> None:
        self._watch = watch
        self._begun = False
        self._last_answer: object = None

    async def begin(self) -> None:
        """Start watching when the first request is sent; later calls do nothing."""
        if not self._begun:
            self._begun, self._last_answer = True, await self._watch.last_answer()

    async def lasts(self) -> bool:
        """Return whether it still lasts."""
        return await self._watch.last_answer() == self._last_answer


def _sum(total: int | None, more: int | None) -> int | None:
    return total if more is None else (total or 0) + more
