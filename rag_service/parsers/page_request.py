"""One request about one picture: the retry schedule, whose fault a silence is, what it cost.

Used by the page readers of this package; knows nothing of page states.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime

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
    """How a picture is asked about; `room` multiplies the tokens that its area allows."""

    prompt: str
    room: float = 1.0
    warm: bool = False


class PageAtWork:
    """A page on its way: what became known of it and what its requests have cost so far."""

    def __init__(self, task: PageTask) -> None:
        self.number = task.number
        self.tries = task.tries
        self.dpi: float | None = None
        self.warnings: tuple[PdfWarning, ...] = ()
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.model: str | None = None
        self._began: float | None = None
        self._ended = 0.0

    def drawn(self, dpi: float, warnings: tuple[PdfWarning, ...]) -> None:
        """It was drawn at this resolution."""
        self.dpi, self.warnings = dpi, warnings

    def asked(self) -> None:
        """A request about it goes out."""
        if self._began is None:
            self._began = time.monotonic()

    def answered(self, answer: PageAnswer) -> None:
        """An answer about it came."""
        self._ended = time.monotonic()
        self.model = answer.model
        self.prompt_tokens = _sum(self.prompt_tokens, answer.prompt_tokens)
        self.completion_tokens = _sum(self.completion_tokens, answer.completion_tokens)

    @property
    def seconds(self) -> float | None:
        """From its first request to its last answer."""
        return None if self._began is None else round(max(0.0, self._ended - self._began), 3)


class Asking:
    """All requests of one job, each in a place of the process's limiter."""

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

    async def learn_model(self) -> None:
        """Ask the server about its model: who serves it, and how long a context it has."""
        info = await self._client.model_info()
        self.engine, self._max_model_len = info.owner, info.max_model_len

    async def ask(self, page: PageAtWork, picture: PagePart, question: PageQuestion) -> PageAnswer:
        """One answer, through the retry schedule.

        Raises OcrOutage where nothing was answered, TryAgain, Rejected, ServerFailed, LeaseLost.
        """
        silence = _Silence(self._watch)
        schedule = page_schedule(self._settings.retry, sleep=self._sleep)
        try:
            return await schedule(self._post, page, picture, question, silence)
        except TryAgain as error:
            if await silence.lasts() and not await self._page_is_at_fault(page):
                raise OcrOutage(str(error)) from error
            raise

    def budget(self, picture: PagePart, room: float) -> int:
        """Tokens that an answer about the picture may take."""
        return answer_budget(
            picture.width,
            picture.height,
            ceiling=self._settings.ocr.max_tokens,
            max_model_len=self._max_model_len,
            room=room,
        )

    async def _page_is_at_fault(self, page: PageAtWork) -> bool:
        """Whether a silent server is told from a page that silences it.

        On its later try others were answered while it was not, and the server says it is well.
        """
        return page.tries > 0 and (await self._client.probe()).ok

    async def _post(
        self, page: PageAtWork, picture: PagePart, question: PageQuestion, silence: _Silence
    ) -> PageAnswer:
        async with self._limiter.request():
            await silence.begin()
            await self._sink.require_lease()
            page.asked()
            answer = await self._read(picture, question)
        page.answered(answer)
        await self._watch.answered()
        return answer

    async def _read(self, picture: PagePart, question: PageQuestion) -> PageAnswer:
        try:
            return await self._client.read(
                picture.jpeg,
                prompt=question.prompt,
                max_tokens=self.budget(picture, question.room),
                warm=question.warm,
            )
        except ConnectionRefused as error:
            probe = await self._client.probe()
            if not probe.ok:
                raise OcrOutage(probe.message) from error
            raise


class _Silence:
    """Whether nobody had an answer since a request first went out."""

    def __init__(self, watch: ServerWatch) -> None:
        self._watch = watch
        self._begun = False
        self._before: datetime | None = None

    async def begin(self) -> None:
        """The request goes out; only the first time counts."""
        if not self._begun:
            self._begun, self._before = True, await self._watch.last_answer()

    async def lasts(self) -> bool:
        return await self._watch.last_answer() == self._before


def _sum(total: int | None, more: int | None) -> int | None:
    return total if more is None else (total or 0) + more
