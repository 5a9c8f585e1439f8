"""The interface of parsers: what a parser is given and what it returns.

A parser knows no database: it reads pages from a PageSource, passes each result to a PageSink,
and asks a ServerWatch what other workers know about its server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rag_service.errors import RagServiceError
from rag_service.layout.page_layout import Bbox
from rag_service.ocr.concurrency.limiter import LimiterLoad, Together
from rag_service.pdf.results import Crop, PagePicture, RenderedPage
from rag_service.states import LayoutMode, PageState


@dataclass(frozen=True, slots=True)
class PageWarning:
    """A defect of a page that is not a failure but must be visible."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Region:
    """A block of a page in reading order: its label, its box and its Markdown."""

    index: int
    label: str
    bbox: Bbox
    content: str


@dataclass(frozen=True, slots=True)
class PageResult:
    """The outcome of one page.

    `retry_in`: seconds until the page's one later try; the page stays pending. Else None.
    """

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
    """One page to read; `tries` counts its later tries so far."""

    number: int
    tries: int = 0


@dataclass(frozen=True, slots=True)
class ParseJob:
    """The remaining pages of one run, and how to read them."""

    run_id: str
    model: str
    dpi: int
    layout: LayoutMode
    pages: Sequence[PageTask]


class PageSource(Protocol):
    """Draws pages of the document."""

    async def render(self, number: int, dpi: int) -> RenderedPage:
        """Draw the page as a JPEG. Raises PageTooLarge, PageTimeout, PageUnrenderable."""
        ...

    async def layout_picture(self, number: int, dpi: int) -> PagePicture:
        """Draw a small picture of the page for its layout. Raises as `render` does."""
        ...

    async def crops(self, number: int, dpi: int, boxes: Sequence[Bbox]) -> list[Crop]:
        """Cut these boxes out of the page, each as a JPEG, in order. Raises as `render` does."""
        ...


class PageSink(Protocol):
    """Stores each page when it is done."""

    async def begin_page(self, number: int) -> None:
        """Record that the page is about to be sent. Raises LeaseLost, Draining."""
        ...

    async def require_lease(self) -> None:
        """Raise LeaseLost if the lease was lost. Called directly before each request."""
        ...

    async def store(self, result: PageResult) -> None:
        """Store the page's outcome under the run's claim. Raises LeaseLost."""
        ...


class ServerWatch(Protocol):
    """What all workers together know about the OCR server."""

    async def is_up(self) -> bool:
        """Return True if the server is known to answer; else the first request is sent alone."""
        ...

    async def last_answer(self) -> object:
        """Return a mark that changes when any worker gets a page answered."""
        ...

    async def answered(self) -> None:
        """Record that a page of this worker was answered now."""
        ...

    async def good_limit(self) -> float | None:
        """Return this process's share of the last good number in flight; None if none is known."""
        ...

    async def processes(self) -> int:
        """Return how many processes, on all machines, may work on the server."""
        ...

    async def report(self, load: LimiterLoad) -> Together | None:
        """Report this process's open requests, about once a second.

        Returns what all processes that use the server have, this one included; None if unknown.
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
