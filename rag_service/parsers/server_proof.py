"""Whether a page ends badly because of itself or of the server: does the server read a known page?

No page fails, and none is called empty, while the server reads no page at all.
"""

from __future__ import annotations

import asyncio
import time

from rag_service.errors import OcrOutage
from rag_service.layout.page_layout import Task
from rag_service.ocr.cleanup.refusal import is_refusal
from rag_service.ocr.known_page import known_page, known_page_size
from rag_service.ocr.ocr_client import Rejected, ServerFailed
from rag_service.parsers.answer_reader import Reading, reading_of
from rag_service.parsers.block_markdown import PROMPTS
from rag_service.parsers.contract import ServerWatch
from rag_service.parsers.page_request import (
    PageInProgress,
    PagePart,
    PageQuestion,
    PageRequester,
    Silence,
)
from rag_service.runtime.retry import TryAgain

# A server that works answers a few words sooner, also if it is busy.
_ANSWER_SECONDS = 120.0
# Other processes note a page that was read within two seconds.
_OTHERS_SECONDS, _LOOK_SECONDS = 5.0, 0.25
_SHOWN_LETTERS = 120
_QUESTION = PageQuestion(PROMPTS[Task.TEXT])


class ServerProof:
    """Judges the bad pages of one job."""

    def __init__(self, requester: PageRequester, watch: ServerWatch, dpi: int) -> None:
        self._requester = requester
        self._watch = watch
        self._dpi = dpi
        self._lock = asyncio.Lock()
        # When the last known page that was read was sent, and its size.
        self._sent_at, self._sent_pixels = float("-inf"), 0

    async def is_page_at_fault(self, page: PageInProgress) -> bool:
        """Return True if the server reads the known page after this page has ended badly.

        Return False if it does not, but reads other pages. Raises OcrOutage if it reads none,
        LeaseLost.
        """
        ended = time.monotonic()
        async with self._lock:
            fault = await self._fault(page, ended)
        if fault is None:
            await self._watch.answered()
            return True
        if await page.others_were_read() and await self._reads_only_others(page):
            return False
        raise OcrOutage(fault)

    async def _reads_only_others(self, page: PageInProgress) -> bool:
        """Return whether the server reads another page within some seconds, but not the known one.

        Pages that were read before may have been the last ones; if it reads the known page now,
        its outage has just ended.
        """
        silence = Silence(self._watch)
        await silence.begin()
        deadline = time.monotonic() + _OTHERS_SECONDS
        while time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_SECONDS)
            if not await silence.lasts():
                return await self._fault(page, time.monotonic()) is not None
        return False

    async def _fault(self, page: PageInProgress, ended: float) -> str | None:
        """Return what is wrong with the server, or None if it reads the known page."""
        width, height = known_page_size(page.pixels, self._dpi)
        if self._sent_at > ended and self._sent_pixels >= width * height:
            return None
        sent_at = time.monotonic()
        fault = await self._fault_now(PagePart(known_page(width, height), width, height))
        if fault is None:
            self._sent_at, self._sent_pixels = sent_at, width * height
        return fault

    async def _fault_now(self, known: PagePart) -> str | None:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                answer = await self._requester.ask_once(known, _QUESTION)
        except Rejected as error:
            return f"every page is refused: {error.message}"
        except ServerFailed as error:
            return f"every page fails: {error.message}"
        except TryAgain as error:
            return f"no page is read: {error}"
        except TimeoutError:
            return f"no page is read: no answer within {_ANSWER_SECONDS:.0f} s"
        return _fault_of(reading_of(known, answer, _QUESTION.prompt))


def _fault_of(reading: Reading) -> str | None:
    """Return what is wrong with the reading of the known page, or None."""
    if not reading.text:
        return "no page is read: the answers have no text, not even for a page with large words"
    if is_refusal(reading.text):
        return f"every page is refused: the model answers {_shown(reading.text)}"
    if reading.only_loop:
        return f"no page is read: the answers only repeat {_shown(reading.text)}"
    return None


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= _SHOWN_LETTERS else line[:_SHOWN_LETTERS] + "…")
