"""Read the pages of one job with the same parser as a direct OCR server, without a database.

PageSource, PageSink and ServerWatch are in memory; a loop gives pages their later try.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rag_service.config.options import Settings
from rag_service.errors import PageError
from rag_service.layout.page_layout import Bbox
from rag_service.ocr.concurrency.limiter import LimiterLoad
from rag_service.parsers.contract import PageResult, PageTask, ParseJob, Region
from rag_service.parsers.glmocr import VERSION, GlmOcr
from rag_service.pdf.results import Crop, PagePicture, RenderedPage
from rag_service.pdf.session import PdfSession
from rag_service.runpod.job_format import (
    EngineInfo,
    JobInput,
    PageOutput,
    PageProblem,
    RegionOutput,
    Tokens,
)
from rag_service.states import LayoutMode, PageState
from workers.runpod_handler.volume import Claim


async def read_pages(
    settings: Settings, job: JobInput, pdf: PdfSession, results: JobResults
) -> None:
    """Read every page that `results` lacks. Raises OcrOutage, ClaimLost."""
    source = JobPages(pdf, job.pages)
    parser = GlmOcr(settings)
    tasks = results.missing()
    while tasks:
        work = ParseJob(
            job.request_key,
            settings.ocr.model,
            job.options.dpi,
            LayoutMode(job.options.layout),
            tasks,
        )
        await parser.parse(work, source, results, LocalServer())
        tasks = results.missing()
        if tasks:
            await asyncio.sleep(results.later_wait)


class JobPages:
    """Renders pages by their original numbers."""

    def __init__(self, pdf: PdfSession, pages: list[int]) -> None:
        self._pdf = pdf
        self._places = {number: place for place, number in enumerate(pages, start=1)}

    async def render(self, number: int, dpi: int) -> RenderedPage:
        """Return a JPEG of the page. Raises PageTooLarge, PageTimeout, PageUnrenderable."""
        with self._place_of(number) as place:
            return replace(await self._pdf.render(place, dpi), number=number)

    async def layout_picture(self, number: int, dpi: int) -> PagePicture:
        """Return a small picture of the page for its layout. Raises as `render` does."""
        with self._place_of(number) as place:
            return replace(await self._pdf.layout_picture(place, dpi), number=number)

    async def crops(self, number: int, dpi: int, boxes: Sequence[Bbox]) -> list[Crop]:
        """Return parts of the page in order, each as a JPEG. Raises as `render` does."""
        with self._place_of(number) as place:
            return await self._pdf.crops(place, dpi, boxes)

    @contextmanager
    def _place_of(self, number: int) -> Iterator[int]:
        """Return the page's place in the job's file; errors name the original number."""
        place = self._places[number]
        try:
            yield place
        except PageError as error:
            message = error.message.replace(f"Page {place} ", f"Page {number} ")
            raise type(error)(message, page=number) from error


class JobResults:
    """The job's pages as they end; pages without error are stored under the request key."""

    def __init__(self, job: JobInput, claim: Claim, on_page: Callable[[int], None]) -> None:
        """`on_page` is called with the number of pages that are still missing."""
        self.done: dict[int, PageOutput] = {
            number: page for number, page in claim.pages().items() if number in job.pages
        }
        self.engine = EngineInfo()
        self.later_wait = 0.0
        self._pages = job.pages
        self._claim = claim
        self._on_page = on_page
        self._tries: dict[int, int] = {}

    def missing(self) -> list[PageTask]:
        """Return the pages that are not done, with the number of their later tries."""
        return [
            PageTask(number, self._tries.get(number, 0))
            for number in self._pages
            if number not in self.done
        ]

    async def begin_page(self, number: int) -> None:  # noqa: ARG002
        await self._claim.require_valid()

    async def require_lease(self) -> None:
        await self._claim.require_valid()

    async def store(self, result: PageResult) -> None:
        if result.engine or result.model:
            self.engine = EngineInfo(name=result.engine, model=result.model)
        if result.state is PageState.PENDING:
            self._tries[result.number] = self._tries.get(result.number, 0) + 1
            self.later_wait = result.retry_in or 0.0
            return
        page = as_output(result)
        await self._claim.keep(page)
        self.done[page.page] = page
        self._on_page(len(self._pages) - len(self.done))


class LocalServer:
    """The OCR server in this worker. It passed its probe, and no other process reports about it."""

    def __init__(self) -> None:
        self._answers = 0

    async def is_up(self) -> bool:
        return True

    async def last_answer(self) -> int:
        return self._answers

    async def answered(self) -> None:
        self._answers += 1

    async def good_limit(self) -> float | None:
        """Return None: the limiter lives as long as this process, which is the only client."""
        return None

    async def processes(self) -> int:
        return 1

    async def report(self, load: LimiterLoad) -> None: ...


def as_output(result: PageResult) -> PageOutput:
    """Convert a page to the format of the job's output."""
    error = result.error
    return PageOutput(
        page=result.number,
        markdown=without_lone_surrogates(result.markdown),
        regions=[_region(region) for region in result.regions],
        finish_reason=result.finish_reason,
        tokens=Tokens(prompt=result.prompt_tokens, completion=result.completion_tokens),
        seconds=result.seconds,
        dpi=result.dpi,
        parser_version=VERSION,
        warnings=[PageProblem(code=w.code, message=w.message) for w in result.warnings],
        error=PageProblem(code=error.code, message=error.message) if error else None,
    )


def _region(region: Region) -> RegionOutput:
    return RegionOutput(
        index=region.index,
        label=region.label,
        bbox_2d=region.bbox,
        content=without_lone_surrogates(region.content),
    )


def without_lone_surrogates(text: str) -> str:
    """Replace halves of surrogate pairs, which models produce and UTF-8 cannot encode."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def settings_for(settings: Settings, max_tokens: int) -> Settings:
    """Return the settings with the job's token limit if it is the lower one."""
    limit = min(max_tokens, settings.ocr.max_tokens)
    return settings.model_copy(
        update={"ocr": settings.ocr.model_copy(update={"max_tokens": limit})}
    )


def in_order(job: JobInput, done: Mapping[int, PageOutput]) -> list[PageOutput]:
    return [done[number] for number in job.pages if number in done]
