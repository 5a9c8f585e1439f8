"""What a parser is given and what it gives back. Implemented in this package, driven by workers.

A parser knows no database: it reads pages from a PageSource, hands each to a PageSink as it
ends, and asks a ServerWatch what other workers saw of its server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from rag_service.errors import RagServiceError
from rag_service.layout.page_layout import Bbox
from rag_service.ocr.concurrency.limiter import LimiterLoad, Together
from rag_service.pdf.results import Crop, PagePicture, RenderedPage
from rag_service.states import LayoutMode, PageState


@dataclass(frozen=True, slots=True)
class PageWarning:
    """Something about a page that is no failure and must not be silent."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Region:
    """A block of a page in reading order: its label, its place and its Markdown."""

    index: int
    label: str
    bbox: Bbox
    content: str


@dataclass(frozen=True, slots=True)
class PageResult:
    """What came of one page. `retry_in` is set where it gets one later try: it stays pending."""

    number: int
    state: PageState
    markdown: str = ""
    regions: Sequence[Region] = ()
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    seconds: float | None = None
    engine: str | None = None
    model: str | None = None
    dpi: float | None = None
    warnings: Sequence[PageWarning] = field(default_factory=tuple)
    error: RagServiceError | None = None
    retry_in: float | None = None


@dataclass(frozen=True, slots=True)
class PageTask:
    """One page to read; `tries` counts the later tries it has had."""

    number: int
    tries: int = 0


@dataclass(frozen=True, slots=True)
class ParseJob:
    """The pages of one run that remain, and how to read them."""

    run_id: str
    model: str
    dpi: int
    layout: LayoutMode
    pages: Sequence[PageTask]


class PageSource(Protocol):
    """Renders pages of the document at work."""

    async def render(self, number: int, dpi: int) -> RenderedPage:
        """A JPEG of the page. Raises PageTooLarge, PageTimeout, PageUnrenderable."""
        ...

    async def layout_picture(self, number: int, dpi: int) -> PagePicture:
        """A small picture of the page, for its layout. Raises as `render` does."""
        ...

    async def crops(self, number: int, dpi: int, boxes: Sequence[Bbox]) -> list[Crop]:
        """Those parts of the page, each as a JPEG, in order. Raises as `render` does."""
        ...


class PageSink(Protocol):
    """Stores pages as they end."""

    async def in_hand(self, number: int) -> None:
        """Note that the page is about to be sent. Raises LeaseLost, Draining."""
        ...

    async def still_ours(self) -> None:
        """Right before each request: raise LeaseLost where the run is ours no longer."""
        ...

    async def store(self, result: PageResult) -> None:
        """Store the page's outcome under the run's claim. Raises LeaseLost."""
        ...


class ServerWatch(Protocol):
    """What all workers together know of the OCR server."""

    async def is_up(self) -> bool:
        """Whether the server is known to answer; if not, the first request goes out alone."""
        ...

    async def last_answer(self) -> datetime | None:
        """When any worker last had a page answered: to be compared with another such moment only.

        The clock is not this machine's.
        """
        ...

    async def answered(self) -> None:
        """A page of ours was answered now."""
        ...

    async def good_limit(self) -> float | None:
        """This process's part of the requests in flight that were last right; None at first."""
        ...

    async def report(self, load: LimiterLoad) -> Together | None:
        """What this process has open at it; called about once a second.

        Who is at work on it, this process included; None where that is not known.
        """
        ...


class Parser(Protocol):
    """A way to read the pages of a document."""

    name: str
    version: str

    async def parse(
        self, job: ParseJob, source: PageSource, sink: PageSink, watch: ServerWatch
    ) -> None:
        """Read every page of the job. Raises OcrOutage, LeaseLost, Draining."""
        ...
