"""The routes of a document's pages: as JSON, as images, as one Markdown text."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import Annotated

import anyio
from fastapi import APIRouter, Header, Path, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from rag_service import errors
from rag_service.api.document_routes import DocumentId, no_such_document, require_document
from rag_service.api.problems import error_responses
from rag_service.api.query_parameters import KNOWN_PARAMETERS_ONLY
from rag_service.api.resources import Resources
from rag_service.errors import InvalidOptions, NotFound
from rag_service.knowledgebase.document_markdown import outcome_of, page_section
from rag_service.knowledgebase.document_queries import StoredSource, get_source
from rag_service.knowledgebase.page_queries import get_page, list_pages, shown_run_id
from rag_service.knowledgebase.views import DocumentView, PageView, WholePageView
from rag_service.layout.page_layout import Bbox
from rag_service.states import RunState

router = APIRouter(tags=["pages"], dependencies=[KNOWN_PARAMETERS_ONLY])

_LISTED = 100
_MOST_LISTED = 500
# Pages of Markdown that are in memory at a time.
_STREAMED = 20
_CACHED = "private, max-age=3600"
_LARGEST_INT = 2**31 - 1
PageNumber = Annotated[int, Path(description="The number of the page, from 1.", examples=[1])]
_THOUSANDTHS = "(1000|[0-9]{1,3})"
_BBOX = f"^{_THOUSANDTHS}(,{_THOUSANDTHS}){{3}}$"


class PageList(BaseModel):
    """Some pages of the document's current run."""

    run_id: str = Field(description="The run that the pages belong to.")
    pages: list[PageView] = Field(description="The pages in order.")
    next_after: int | None = Field(
        description="Send it as `after` to get the next pages; null at the end."
    )


@router.get(
    "/documents/{document_id}/pages", summary="List pages", responses=error_responses(NotFound)
)
def pages(
    document_id: DocumentId,
    after: Annotated[
        int, Query(ge=0, le=_LARGEST_INT, description="Return the pages after this page number.")
    ] = 0,
    limit: Annotated[
        int, Query(ge=1, le=_MOST_LISTED, description="Pages in one answer.")
    ] = _LISTED,
) -> PageList:
    """Return pages in order, each with its text, its state and how it was read."""
    run_id = _require_run(document_id)
    found = list_pages(run_id, after=after, limit=limit + 1)
    shown = found[:limit]
    more = len(found) > limit
    return PageList(run_id=run_id, pages=shown, next_after=shown[-1].number if more else None)


@router.get(
    "/documents/{document_id}/pages/{number}",
    summary="Show a page",
    responses=error_responses(NotFound),
)
def page(document_id: DocumentId, number: PageNumber) -> WholePageView:
    """Return one page with its regions. The first page is 1."""
    run_id = _require_run(document_id)
    found = get_page(run_id, number) if 1 <= number <= _LARGEST_INT else None
    if found is None:
        raise NotFound(f"No page {number}, or the document's pages are not counted yet.")
    return found


def _require_run(document_id: str) -> str:
    run_id = shown_run_id(document_id)
    if run_id is None:
        raise no_such_document(document_id)
    return run_id


@router.get(
    "/documents/{document_id}/pages/{number}/image",
    summary="Image of a page",
    response_class=Response,
    responses={
        200: {"content": {"image/jpeg": {}}, "description": "A JPEG."},
        304: {"description": "The image that the caller has is unchanged."},
        **error_responses(
            NotFound,
            InvalidOptions,
            errors.SourceMissing,
            errors.EncryptedPdf,
            errors.CorruptPdf,
            errors.PageTooLarge,
            errors.PageTimeout,
            errors.PageUnrenderable,
            errors.Busy,
        ),
    },
)
async def image(
    document_id: DocumentId,
    number: PageNumber,
    resources: Resources,
    dpi: Annotated[
        int | None,
        Query(ge=36, le=300, description="Resolution in DPI; default: the setting ocr.dpi."),
    ] = None,
    bbox: Annotated[
        str | None,
        Query(
            pattern=_BBOX,
            description="A part of the page by two of its corners: x1,y1,x2,y2 in thousandths of "
            "its width and height, from the top left; default: the whole page.",
            examples=["100,250,900,600"],
        ),
    ] = None,
    if_none_match: Annotated[
        str | None, Header(description="The `ETag` of the image that the caller has.")
    ] = None,
) -> Response:
    """Render a page, or a part of it, from the stored file. The first page is 1.

    The answer may be cached; `ETag` and `If-None-Match` are supported.
    """
    box = _box(bbox) if bbox is not None else None
    source = await anyio.to_thread.run_sync(_require_source, document_id)
    dpi = dpi or resources.settings.ocr.dpi
    headers = {"ETag": _etag(source, number, dpi, box), "Cache-Control": _CACHED}
    if if_none_match is not None and headers["ETag"] in if_none_match:
        return Response(status_code=304, headers=headers)
    store = await anyio.to_thread.run_sync(lambda: resources.store)
    jpeg = await resources.page_images.render(store, source, number, dpi, box)
    return Response(jpeg, media_type="image/jpeg", headers=headers)


def _box(text: str) -> Bbox:
    """Return the box. Raises InvalidOptions."""
    x1, y1, x2, y2 = map(int, text.split(","))
    if x1 == x2 or y1 == y2:
        raise InvalidOptions("bbox: the corners x1,y1 and x2,y2 must differ in both directions.")
    return min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)


def _require_source(document_id: str) -> StoredSource:
    source = get_source(document_id)
    if source is None:
        raise no_such_document(document_id)
    return source


def _etag(source: StoredSource, number: int, dpi: int, box: Bbox | None) -> str:
    """Return the ETag. The bytes of a key never change, so these values identify the image."""
    return f'"{sha256(f"{source.key} {number} {dpi} {box}".encode()).hexdigest()[:32]}"'


@router.get(
    "/documents/{document_id}/markdown",
    summary="The document as Markdown",
    response_class=Response,
    responses={
        200: {
            "content": {"text/markdown": {"example": "<!-- page 1 -->\n\n# Title\n"}},
            "description": "All pages in order.",
        },
        **error_responses(NotFound),
    },
)
def markdown(document_id: DocumentId, resources: Resources) -> StreamingResponse:
    """Return the text of all pages, each after a comment `<!-- page N -->`.

    The comment of a page without text gives the reason: `<!-- page N: failed, page_timeout -->`.
    If the document is not processed, the text begins with `<!-- document: … -->`.
    """
    found = require_document(document_id, resources)
    return StreamingResponse(
        _text(found, _require_run(document_id)), media_type="text/markdown; charset=utf-8"
    )


def _text(document: DocumentView, run_id: str) -> Iterator[str]:
    """Read some pages at a time, so that a slow client does not keep a database connection."""
    if document.status is not RunState.PROCESSED:
        yield f"<!-- document: {outcome_of(document.status, document.error)} -->\n\n"
    last = 0
    while batch := list_pages(run_id, after=last, limit=_STREAMED):
        for shown in batch:
            yield page_section(shown)
        last = batch[-1].number
