"""Reads a page as a whole, by regions, or as a whole and then by regions."""

from __future__ import annotations

import logging
from dataclasses import replace

from rag_service.errors import LayoutUnavailable, OcrEmpty, OcrRepetition
from rag_service.layout.page_layout import Task
from rag_service.ocr.ocr_client import Rejected, ServerFailed
from rag_service.parsers.answer_reader import (
    SMALLER,
    Flaw,
    PictureReader,
    PictureToRead,
    Reading,
)
from rag_service.parsers.block_markdown import page_markdown, whole_page
from rag_service.parsers.contract import PageResult, PageSource, PageWarning
from rag_service.parsers.page_request import PageInProgress, PagePart
from rag_service.parsers.region_reader import RegionReader, RegionReadings
from rag_service.runtime.retry import TryAgain
from rag_service.states import LayoutMode, PageState

log = logging.getLogger(__name__)

_REFUSED = PageWarning("model_refusal", "The model seems to refuse to read the page or a part.")


class PageReader:
    """Reads single pages of one job."""

    def __init__(
        self,
        source: PageSource,
        reader: PictureReader,
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

    async def read(self, page: PageInProgress) -> PageResult:
        """Read the page and return its outcome.

        Raises PageError, OcrOutage, TryAgain, Rejected, ServerFailed, LeaseLost.
        """
        result = await self._by_mode(page)
        return replace(
            result,
            prompt_tokens=page.prompt_tokens,
            completion_tokens=page.completion_tokens,
            seconds=page.seconds,
            model=page.model,
            dpi=page.dpi,
            warnings=[
                *(PageWarning(w.code, w.message) for w in page.warnings),
                *result.warnings,
                *([_REFUSED] if page.refused else []),
            ],
        )

    async def _whole(self, page: PageInProgress) -> PageResult:
        picture = await self._picture(page)
        first = await self._reader.read_once(page, picture)
        return await self._better_of_two(page, picture, first)

    async def _by_regions(self, page: PageInProgress) -> PageResult:
        """Read by regions, or as a whole if the layout has no region to read or they have no text.

        Raises OcrEmpty if neither has text.
        """
        regions = await self._regions.read(page)
        if regions is None:
            return await self._whole(page)
        if regions.text:
            return _result_by_regions(page, regions)
        whole = await self._reader.read(page, await self._picture(page))
        if whole.flaw is Flaw.EMPTY:
            raise OcrEmpty("The page has text boxes, but neither they nor the page gave text.")
        return _result_as_whole(page, whole)

    async def _whole_then_regions(self, page: PageInProgress) -> PageResult:
        """Read as a whole; if that has a flaw, also by regions, and keep the better one."""
        picture = await self._picture(page)
        first = await self._reader.read_once(page, picture)
        if first.flaw is None:
            return _result_as_whole(page, first)
        regions = await self._second_by_regions(page, first)
        if regions is None:
            return await self._better_of_two(page, picture, first)
        if _is_better(regions, first):
            return _result_by_regions(page, regions)
        if first.flaw is Flaw.EMPTY:
            raise OcrEmpty("The page has text boxes, but neither the page nor they gave text.")
        return _result_as_whole(page, first)

    async def _second_by_regions(
        self, page: PageInProgress, first: Reading
    ) -> RegionReadings | None:
        """Return None if there is no layout, or if a request failed but `first` has text."""
        try:
            return await self._regions.read(page)
        except LayoutUnavailable as error:
            log.warning("Page %d is not read by regions: %s", page.number, error.message)
        except (TryAgain, ServerFailed, Rejected):
            if first.flaw is Flaw.EMPTY:
                raise
        return None

    async def _better_of_two(
        self, page: PageInProgress, picture: PictureToRead, first: Reading
    ) -> PageResult:
        """Return the reading's result, or that of the better of two if the first has a flaw."""
        if first.flaw is None:
            return _result_as_whole(page, first)
        return _result_as_whole(page, await self._reader.better_of_two(page, picture, first))

    async def _picture(self, page: PageInProgress) -> PictureToRead:
        drawn = await self._source.render(page.number, self._dpi)
        page.note_render(drawn.dpi, drawn.warnings)

        async def smaller() -> PagePart:
            less = await self._source.render(page.number, int(drawn.dpi * SMALLER))
            page.note_render(less.dpi, less.warnings)
            return PagePart(less.jpeg, less.width, less.height)

        whole = PagePart(drawn.jpeg, drawn.width, drawn.height)
        return PictureToRead(whole, Task.TEXT, smaller)


def _result_as_whole(page: PageInProgress, reading: Reading) -> PageResult:
    """Return the result of a page read as a whole. Raises OcrEmpty, OcrRepetition."""
    markdown = whole_page(reading.text)
    result = PageResult(page.number, PageState.OCR, markdown, (), reading.finish_reason)
    match reading.flaw:
        case Flaw.EMPTY if reading.finish_reason != "stop":
            raise OcrEmpty("Two readings gave no text before the token limit cut them.")
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


def _result_by_regions(page: PageInProgress, regions: RegionReadings) -> PageResult:
    """Return the result of a page read by regions. Raises OcrRepetition."""
    if regions.only_loops:
        raise OcrRepetition()
    cut, looped = regions.names_with(Flaw.CUT), regions.names_with(Flaw.LOOP)
    return PageResult(
        page.number,
        PageState.TRUNCATED if cut else PageState.OCR,
        page_markdown(regions.visible(), page.number),
        regions.regions(),
        "length" if cut else "stop",
        warnings=[*map(_truncated, cut), *map(_loop_cut, looped)],
    )


def _is_better(regions: RegionReadings, whole: Reading) -> bool:
    """Return True if the regions have more than a flawed reading of the whole page."""
    if not regions.text or regions.only_loops:
        return False
    flawless = not (regions.names_with(Flaw.CUT) or regions.names_with(Flaw.LOOP))
    return flawless or whole.only_loop or len(regions.text) > len(whole.text)


def _truncated(what: str) -> PageWarning:
    return PageWarning("page_truncated", f"{what} stops at the token limit.")


def _loop_cut(what: str) -> PageWarning:
    return PageWarning("repetition_cut", f"{what} contained a repetition loop, which was removed.")
