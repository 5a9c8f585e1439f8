"""The RunPod job, version 1: the input that the handler gets and the output that it returns.

Pages are original page numbers (from 1) in the document's order. The job's document contains only
the pages of the job.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rag_service.states import LayoutMode


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True)


class InlineDocument(_Wire):
    """The document's bytes in the job itself."""

    kind: Literal["inline"] = "inline"
    encoding: Literal["base64", "zip+base64"]
    data: str


class UrlDocument(_Wire):
    """The URL from which the handler downloads the document: https only, checked by its sha256."""

    kind: Literal["url"] = "url"
    url: str
    sha256: str


class JobOptions(_Wire):
    """Options for reading the pages."""

    dpi: int
    layout: LayoutMode
    max_tokens: int


class JobInput(_Wire):
    """One job; `pages` has the original number of each page of the document, in order."""

    version: Literal[1] = 1
    request_key: str
    filename: str
    document: Annotated[InlineDocument | UrlDocument, Field(discriminator="kind")]
    pages: list[int]
    options: JobOptions


class PageProblem(_Wire):
    code: str
    message: str


class Tokens(_Wire):
    prompt: int | None = None
    completion: int | None = None


class RegionOutput(_Wire):
    """A block of a page; `bbox_2d` is x1, y1, x2, y2 in thousandths of the page's sides."""

    index: int
    label: str
    bbox_2d: tuple[int, int, int, int]
    content: str


class PageOutput(_Wire):
    """The text of one page and its warnings, or the `error` if it could not be read."""

    page: int
    markdown: str = ""
    regions: list[RegionOutput] = []
    finish_reason: str | None = None
    tokens: Tokens = Tokens()
    seconds: float | None = None
    dpi: float | None = None
    parser_version: str | None = None
    warnings: list[PageProblem] = []
    error: PageProblem | None = None


class EngineInfo(_Wire):
    name: str | None = None
    model: str | None = None
    version: str | None = None


class GaugeMeans(_Wire):
    """Means over the job's time, from the OCR server in the worker."""

    running_mean: float | None = None
    waiting_mean: float | None = None
    slots: int | None = None


class JobOutput(_Wire):
    """A finished job; `remaining_pages` did not fit the answer's size limit."""

    version: Literal[1]
    request_key: str
    pages: list[PageOutput]
    remaining_pages: list[int] = []
    engine: EngineInfo = EngineInfo()
    gauges: GaugeMeans | None = None
    timings: dict[str, float] = {}
    debug: list[str] = []
