"""What a page ends in: read whole, by regions, or whole and then by regions. Used by glmocr.py."""

from __future__ import annotations

import logging
from dataclasses import replace

from rag_service.errors import LayoutUnavailable, OcrEmpty, OcrRepetition
from rag_service.layout.page_layout import Task
from rag_service.ocr.ocr_client import Rejected, ServerFailed
from rag_service.parsers.answer_reader import SMALLER, Flaw, Reader, Reading, Subject
from rag_service.parsers.block_markdown import page_markdown, whole_page
from rag_service.parsers.contract import PageResult, PageSource, PageTask, PageWarning
from rag_service.parsers.page_request import PageAtWork, PagePart
from rag_service.parsers.region_reader import Blocks, RegionReader
from rag_service.runtime.retry import TryAgain
from rag_service.states import LayoutMode, PageState

log = logging.getLogger(__name__)


class PageReader:
    """Reads single pages of one job."""

    def __init__(
        self,
        source: PageSource,
        reader: Reader,
        regions: RegionReader,
        *,
        mode: LayoutMode,
        dpi: int,
    ) -> None:
        self._source = source
        self._reader = reader
        self._regions = regions
        self._dpi = dpi
        self._by_mode = {
            LayoutMode.PAGE: self._whole,
            LayoutMode.REGIONS: self._by_regions,
            LayoutMode.AUTO: self._whole_then_regions,
        }[mode]

    async def read(self, task: PageTask) -> PageResult:
        """What the page ends in.

        Raises PageError, OcrOutage, TryAgain, Rejected, ServerFailed, LeaseLost.
        """
        page = PageAtWork(task)
        result = await self._by_mode(page)
        return replace(
            result,
            prompt_tokens=page.prompt_tokens,
            completion_tokens=page.completion_tokens,
            seconds=page.seconds,
            model=page.model,
            dpi=page.dpi,
            warnings=[*(PageWarning(w.code, w.message) for w in page.warnings), *result.warnings],
        )

    async def _whole(self, page: PageAtWork) -> PageResult:
        subject = await self._subject(page)
        first = await self._reader.once(page, subject)
        return await self._settled(page, subject, first)

    async def _by_regions(self, page: PageAtWork) -> PageResult:
        """By regions; whole where the layout has nothing to read, or its regions no text."""
        blocks = await self._regions.read(page)
        if blocks is None:
            return await self._whole(page)
        if blocks.text:
            return _of_blocks(page, blocks)
        subject = await self._subject(page)
        whole = await self._reader.read(page, subject)
        if whole.flaw is Flaw.EMPTY:
            raise OcrEmpty("The page has text boxes, and neither they nor the page were read.")
        return _of_whole(page, whole)

    async def _whole_then_regions(self, page: PageAtWork) -> PageResult:
        """Whole; a flawed reading is followed by regions, and the better of the two is kept."""
        subject = await self._subject(page)
        first = await self._reader.once(page, subject)
        if first.flaw is None:
            return _of_whole(page, first)
        blocks = await self._second_by_regions(page, first)
        if blocks is None:
            return await self._settled(page, subject, first)
        if _is_better(blocks, first):
            return _of_blocks(page, blocks)
        if first.flaw is Flaw.EMPTY:
            raise OcrEmpty("The page has text boxes, and neither it nor they were read.")
        return _of_whole(page, first)

    async def _second_by_regions(self, page: PageAtWork, first: Reading) -> Blocks | None:
        """None where there is no layout to go by, or the text at hand is all there will be."""
        try:
            return await self._regions.read(page)
        except LayoutUnavailable as error:
            log.warning("Page %d is not read by regions: %s", page.number, error.message)
        except (TryAgain, ServerFailed, Rejected):
            if first.flaw is Flaw.EMPTY:
                raise
        return None

    async def _settled(self, page: PageAtWork, subject: Subject, first: Reading) -> PageResult:
        """By the reading itself, or by the better of two where it has a flaw."""
        if first.flaw is None:
            return _of_whole(page, first)
        return _of_whole(page, await self._reader.better(page, subject, first))

    async def _subject(self, page: PageAtWork) -> Subject:
        drawn = await self._source.render(page.number, self._dpi)
        page.drawn(drawn.dpi, drawn.warnings)

        async def smaller() -> PagePart:
            less = await self._source.render(page.number, int(drawn.dpi * SMALLER))
            page.drawn(less.dpi, less.warnings)
            return PagePart(less.jpeg, less.width, less.height)

        return Subject(PagePart(drawn.jpeg, drawn.width, drawn.height), Task.TEXT, smaller)


def _of_whole(page: PageAtWork, reading: Reading) -> PageResult:
    """Raises OcrEmpty, OcrRepetition."""
    markdown = whole_page(reading.text)
    result = PageResult(page.number, PageState.OCR, markdown, (), reading.finish_reason)
    match reading.flaw:
        case Flaw.EMPTY if reading.finish_reason != "stop":
            raise OcrEmpty("Two readings found ink and came back without text, cut by their limit.")
        case Flaw.EMPTY:
            warning = PageWarning("page_without_text", "Two readings found ink but no writing.")
            return replace(result, state=PageState.NO_TEXT, warnings=[warning])
        case Flaw.LOOP if reading.only_loop:
            raise OcrRepetition()
        case Flaw.LOOP:
            return replace(result, warnings=[_loop_cut("The text")])
        case Flaw.CUT:
            return replace(result, state=PageState.TRUNCATED, warnings=[_truncated("The text")])
    return result


def _of_blocks(page: PageAtWork, blocks: Blocks) -> PageResult:
    """Raises OcrRepetition."""
    if blocks.only_loops:
        raise OcrRepetition()
    cut, looped = blocks.having(Flaw.CUT), blocks.having(Flaw.LOOP)
    return PageResult(
        page.number,
        PageState.TRUNCATED if cut else PageState.OCR,
        page_markdown(blocks.shown(), page.number),
        blocks.regions(),
        "length" if cut else "stop",
        warnings=[*map(_truncated, cut), *map(_loop_cut, looped)],
    )


def _is_better(blocks: Blocks, whole: Reading) -> bool:
    """Whether the regions say more than a flawed reading of the whole page."""
    if not blocks.text or blocks.only_loops:
        return False
    flawless = not (blocks.having(Flaw.CUT) or blocks.having(Flaw.LOOP))
    return flawless or whole.only_loop or len(blocks.text) > len(whole.text)


def _truncated(what: str) -> PageWarning:
    return PageWarning("page_truncated", f"{what} stops at the token limit.")


def _loop_cut(what: str) -> PageWarning:
    return PageWarning("repetition_cut", f"{what} ran into a loop, which was cut.")
