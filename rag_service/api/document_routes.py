"""The routes of documents: add, list, look at, cancel, delete. Part of the API."""

from __future__ import annotations

import base64
import re
from datetime import datetime
from functools import partial
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, StringConstraints

from rag_service import errors
from rag_service.api import upload
from rag_service.api.problems import error_responses
from rag_service.api.query_parameters import KNOWN_PARAMETERS_ONLY
from rag_service.api.resources import Here, Services
from rag_service.documents import deletion
from rag_service.documents.decryption import unlocked
from rag_service.documents.intake import Accepted, accept, check_options, require_backlog_space
from rag_service.errors import InvalidOptions, NotFound
from rag_service.knowledgebase.document_queries import Filter, get_document, list_documents
from rag_service.knowledgebase.views import DocumentView
from rag_service.states import OcrMode, Priority, RunState

router = APIRouter(tags=["documents"], dependencies=[KNOWN_PARAMETERS_ONLY])

OPTIONS = ("collection", "parser", "ocr", "priority", "password")
_ID = re.compile(r"[0-9a-f]{32}")
# From this size on the backlog is looked at before the body is read.
_LARGE_BYTES = 1024 * 1024
_LISTED = 50
_SHOWN_LETTERS = 64
_MOST_LISTED = 500


def require_id(document_id: str) -> str:
    """The id itself; NotFound for what no document can be called."""
    if not _ID.fullmatch(document_id):
        raise unknown(document_id)
    return document_id


def unknown(document_id: str) -> NotFound:
    """Names the id, cut where it is no id at all."""
    return NotFound(f"There is no document {document_id[:_SHOWN_LETTERS]}.")


async def _path_id(document_id: str) -> str:
    return require_id(document_id)


DocumentId = Annotated[str, Depends(_path_id)]
# PostgreSQL refuses NUL in text.
Word = Annotated[str, StringConstraints(max_length=255, pattern=r"^[^\x00]*$")]


class AcceptedView(BaseModel):
    """What became of an upload."""

    id: str = Field(examples=["0b1f5e0c9a5d4c1f8b7e6d5c4b3a2918"])
    status: RunState
    duplicate: bool = Field(description="The same bytes are in this collection already.")


class DocumentList(BaseModel):
    """A page of the listing, newest first."""

    documents: list[DocumentView]
    next_cursor: str | None = Field(description="Send it as `cursor` for the next page.")


class CancelView(BaseModel):
    id: str
    cancelled: bool = Field(description="False where nothing was at work any more.")


_UPLOAD_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": [upload.FILE],
                    "properties": {
                        upload.FILE: {
                            "type": "string",
                            "format": "binary",
                            "description": "PDF, PNG, JPEG, TIFF or WebP; told by its bytes.",
                        },
                        "collection": {"type": "string", "default": "default"},
                        "parser": {"type": "string"},
                        "ocr": {"type": "string", "enum": [m.value for m in OcrMode]},
                        "priority": {"type": "string", "enum": [p.name.lower() for p in Priority]},
                        "password": {
                            "type": "string",
                            "format": "password",
                            "description": "Opens an encrypted PDF once; it is not kept.",
                        },
                    },
                }
            }
        },
    }
}


@router.post(
    "/documents",
    status_code=202,
    response_model=AcceptedView,
    summary="Add a document",
    openapi_extra=_UPLOAD_FORM,
    responses={
        200: {
            "model": AcceptedView,
            "description": "The same bytes are here already, with the same options.",
        },
        **error_responses(
            errors.UnsupportedType,
            errors.EmptyFile,
            errors.InvalidOptions,
            errors.WrongPassword,
            errors.TooLarge,
            errors.OptionsDiffer,
            errors.BacklogFull,
        ),
    },
)
async def add_document(request: Request, here: Here) -> JSONResponse:
    """Store a file and queue it to be read.

    The form's parts may come in any order. 202: a run was queued, and `duplicate` says whether
    the document was known, from a run that had failed or was cancelled. 200: the document is
    known and at work or processed with these options; nothing was done. 409 `options_differ`:
    known with other options; use reprocess.
    """
    async with here.uploads:
        await _require_room(request, here)
        async with upload.received(request, here.settings, OPTIONS, takes_file=True) as form:
            accepted = await _accept(form, here)
    view = AcceptedView(id=accepted.id, status=accepted.status, duplicate=accepted.duplicate)
    return JSONResponse(
        view.model_dump(mode="json"),
        202 if accepted.queued else 200,
        {"Location": f"/documents/{accepted.id}"},
    )


async def _require_room(request: Request, here: Services) -> None:
    """Who sends much, or does not say how much, need not send it in vain."""
    length = request.headers.get("content-length", "")
    if not length.isdecimal() or int(length) >= _LARGE_BYTES:
        await anyio.to_thread.run_sync(require_backlog_space, here.settings)


async def _accept(form: upload.Form, here: Services) -> Accepted:
    chosen = dict(form.fields)
    password = chosen.pop("password", None)
    options = check_options(here.settings, **chosen)
    spool = form.spool
    media_type = spool.finish()
    async with unlocked(here.settings, spool.path, media_type, password) as decrypted:
        return await anyio.to_thread.run_sync(
            partial(
                _commit, here, spool=spool, filename=form.filename, options=options,
                decrypted=decrypted,
            ),
            limiter=here.commits,
        )  # fmt: skip


def _commit(here: Services, **upload_: Any) -> Accepted:
    return accept(here.settings, here.store, **upload_)


@router.get(
    "/documents",
    summary="List documents",
    responses=error_responses(errors.InvalidOptions),
)
def documents(
    here: Here,
    status: Annotated[RunState | None, Query(description="Status of the current run.")] = None,
    collection: Annotated[Word | None, Query()] = None,
    error: Annotated[
        Word | None, Query(description="Error code of the newest run.", examples=["encrypted_pdf"])
    ] = None,
    cursor: Annotated[str | None, Query(description="`next_cursor` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=_MOST_LISTED)] = _LISTED,
) -> DocumentList:
    """Documents, newest first, a page at a time; the filters narrow them together."""
    if error is not None:
        errors.require_outcome_code(error)
    chosen = Filter(status, collection, error, _place(cursor) if cursor else None)
    found = list_documents(chosen, limit + 1, here.ocr_server)
    shown = found[:limit]
    return DocumentList(
        documents=shown, next_cursor=_cursor(shown[-1]) if len(found) > limit else None
    )


def _cursor(last: DocumentView) -> str:
    place = f"{last.created_at.isoformat()} {last.id}"
    return base64.urlsafe_b64encode(place.encode()).decode()


def _place(cursor: str) -> tuple[datetime, str]:
    try:
        moment, _, document_id = base64.urlsafe_b64decode(cursor).decode("ascii").partition(" ")
        created_at = datetime.fromisoformat(moment)
        if created_at.tzinfo is None or not _ID.fullmatch(document_id):
            raise ValueError("not made by _cursor")
    except ValueError as error:
        raise InvalidOptions("cursor: this is not one of ours.") from error
    return created_at, document_id


@router.get(
    "/documents/{document_id}", summary="Look at a document", responses=error_responses(NotFound)
)
def document(document_id: DocumentId, here: Here) -> DocumentView:
    """The document, its progress and what came of it.

    `status`, `pages`, `error` are those of its current run: the newest processed one, else the
    failed one with the most good pages, else the run at work. `latest_run` is the newest.
    """
    return require_document(document_id, here)


def require_document(document_id: str, here: Services) -> DocumentView:
    """The document. Raises NotFound."""
    found = get_document(document_id, here.ocr_server)
    if found is None:
        raise unknown(document_id)
    return found


@router.post(
    "/documents/{document_id}/cancel",
    summary="Cancel a document's run",
    responses=error_responses(NotFound),
)
def cancel(document_id: DocumentId) -> CancelView:
    """End the run at work; pages that are done stay, and reprocess goes on from them."""
    return CancelView(id=document_id, cancelled=deletion.cancel(document_id))


@router.delete(
    "/documents/{document_id}",
    status_code=204,
    summary="Delete a document",
    responses=error_responses(NotFound),
)
def delete(document_id: DocumentId) -> Response:
    """Cancel and remove the document with its pages and bytes; the same file may come again."""
    deletion.delete(document_id)
    return Response(status_code=204)
