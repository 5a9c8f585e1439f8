"""The routes of documents: add, list, show, cancel, delete."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from pathlib import Path as FilePath
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, StringConstraints

from rag_service import errors
from rag_service.api import upload
from rag_service.api.problems import error_responses
from rag_service.api.query_parameters import KNOWN_PARAMETERS_ONLY
from rag_service.api.resources import ApiResources, Resources, client_address
from rag_service.config.options import Settings
from rag_service.documents import deletion
from rag_service.documents.decryption import unlocked
from rag_service.documents.intake import (
    COLLECTION_PATTERN,
    Accepted,
    accept,
    check_options,
    require_backlog_space,
)
from rag_service.errors import InvalidOptions, NotFound
from rag_service.knowledgebase.document_queries import Filter, get_document, list_documents
from rag_service.knowledgebase.views import DocumentView
from rag_service.parsers.registry import PARSERS
from rag_service.states import OcrMode, Priority, RunState

router = APIRouter(tags=["documents"], dependencies=[KNOWN_PARAMETERS_ONLY])

OPTIONS = ("collection", "parser", "ocr", "priority", "password")
_ID = re.compile(r"[0-9a-f]{32}")
# From this size on the backlog limit is checked before the body is read.
_LARGE_BYTES = 1024 * 1024
_LISTED = 50
_SHOWN_LETTERS = 64
_MOST_LISTED = 500


def require_id(document_id: str) -> str:
    """Return the id. Raises NotFound if it cannot be the id of a document."""
    if not _ID.fullmatch(document_id):
        raise no_such_document(document_id)
    return document_id


def no_such_document(document_id: str) -> NotFound:
    """Return the error with the id, which is cut if it is too long for an id."""
    return NotFound(f"No document {document_id[:_SHOWN_LETTERS]}.")


async def _path_id(
    document_id: Annotated[
        str,
        Path(description="The document's id.", examples=["0b1f5e0c9a5d4c1f8b7e6d5c4b3a2918"]),
    ],
) -> str:
    return require_id(document_id)


DocumentId = Annotated[str, Depends(_path_id)]
# PostgreSQL refuses NUL in text.
ShortText = Annotated[str, StringConstraints(max_length=255, pattern=r"^[^\x00]*$")]


class AcceptedView(BaseModel):
    """The document that an upload added or found."""

    id: str = Field(description="The document's id.", examples=["0b1f5e0c9a5d4c1f8b7e6d5c4b3a2918"])
    status: RunState = Field(description="Status of the document's newest run.")
    duplicate: bool = Field(description="The collection had a document with the same bytes before.")


class DocumentList(BaseModel):
    """One page of the list of documents, newest first."""

    documents: list[DocumentView] = Field(description="The documents, newest first.")
    next_cursor: str | None = Field(
        description="Send it as `cursor` to get the next page; null on the last page."
    )


class CancelView(BaseModel):
    """Whether there was a run to cancel."""

    id: str = Field(description="The document's id.")
    cancelled: bool = Field(description="False if the document had no active run.")


_UPLOAD_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": [upload.FILE],
                    "additionalProperties": False,
                    "properties": {
                        upload.FILE: {
                            "type": "string",
                            "format": "binary",
                            "description": "PDF, PNG, JPEG, TIFF or WebP, recognised by its bytes.",
                        },
                        "collection": {
                            "type": "string",
                            "default": "default",
                            "pattern": f"{COLLECTION_PATTERN}|^$",
                            "description": "The collection that the document is added to.",
                        },
                        "parser": {
                            "type": "string",
                            "enum": sorted(PARSERS),
                            "description": "The parser that reads the pages; "
                            "default: the setting parser.default.",
                        },
                        "ocr": {
                            "type": "string",
                            "enum": [m.value for m in OcrMode],
                            "description": "Pages that the OCR server reads: those that need it "
                            "(auto), all (force), none (off).",
                        },
                        "priority": {
                            "type": "string",
                            "enum": [p.name.lower() for p in Priority],
                            "description": "interactive runs are claimed before bulk runs.",
                        },
                        "password": {
                            "type": "string",
                            "format": "password",
                            "description": "Opens an encrypted PDF; used once, not stored.",
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
            "description": "The document was added before with the same options.",
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
async def add_document(request: Request, resources: Resources) -> JSONResponse:
    """Store a file and queue a run for it.

    The parts of the form may come in any order. 202: a run was queued; `duplicate` is true if
    the document was added before and its run had failed or was cancelled. 200: the document was
    added before with the same options and is active or processed; nothing was changed. 409
    `options_differ`: it was added before with other options; use reprocess.
    """
    async with resources.upload_slots.slot(client_address(request)):
        is_large = _is_large(request)
        if is_large:
            # An interactive upload is accepted longest, and the priority is not known yet.
            await _require_backlog_space(resources.settings, Priority.INTERACTIVE)
        # Before the body is received: without its store no document can be kept.
        incoming = await anyio.to_thread.run_sync(resources.store_check.incoming)
        on_file = partial(_check_before_file, resources.settings) if is_large else None
        async with upload.receive_form(
            request, resources.settings, OPTIONS, incoming, on_file=on_file
        ) as form:
            accepted = await _accept(form, resources, incoming)
    view = AcceptedView(id=accepted.id, status=accepted.status, duplicate=accepted.duplicate)
    return JSONResponse(
        view.model_dump(mode="json"),
        202 if accepted.queued else 200,
        {"Location": f"/documents/{accepted.id}"},
    )


def _is_large(request: Request) -> bool:
    """Return whether the upload is large or of unknown size: it must not be sent in vain."""
    length = request.headers.get("content-length", "")
    return not length.isdecimal() or int(length) >= _LARGE_BYTES


async def _require_backlog_space(settings: Settings, priority: Priority) -> None:
    await anyio.to_thread.run_sync(require_backlog_space, settings, priority)


def _check_before_file(settings: Settings, fields: Mapping[str, str]) -> None:
    """Refuse a bulk upload whose priority came before its file."""
    if fields.get("priority") == Priority.BULK.name.lower():
        require_backlog_space(settings, Priority.BULK)


async def _accept(form: upload.Form, resources: ApiResources, incoming: FilePath) -> Accepted:
    chosen = dict(form.fields)
    password = chosen.pop("password", None)
    options = check_options(resources.settings, **chosen)
    file = form.file
    media_type = file.finish()
    settings = resources.settings
    async with unlocked(settings, file.path, media_type, password, incoming) as decrypted:
        return await anyio.to_thread.run_sync(
            partial(
                accept, settings, resources.store, file, form.filename, options,
                decrypted=decrypted,
            ),
            limiter=resources.commit_limiter,
        )  # fmt: skip


@router.get(
    "/documents",
    summary="List documents",
    responses=error_responses(errors.InvalidOptions),
)
def documents(
    resources: Resources,
    status: Annotated[RunState | None, Query(description="Status of the current run.")] = None,
    collection: Annotated[ShortText | None, Query(description="Name of the collection.")] = None,
    error: Annotated[
        ShortText | None,
        Query(
            description="Error code of the newest run or of a page of it.",
            examples=["encrypted_pdf"],
            json_schema_extra={"enum": sorted(errors.outcome_codes())},
        ),
    ] = None,
    id_prefix: Annotated[
        str | None,
        Query(
            pattern="^[0-9a-f]{4,32}$", description="First digits of the id.", examples=["0b1f5e0c"]
        ),
    ] = None,
    cursor: Annotated[str | None, Query(description="`next_cursor` of the previous page.")] = None,
    limit: Annotated[
        int, Query(ge=1, le=_MOST_LISTED, description="Documents on a page.")
    ] = _LISTED,
) -> DocumentList:
    """Return documents, newest first, one page at a time. All filters must match."""
    if error is not None:
        errors.require_outcome_code(error)
    after = _decode_cursor(cursor) if cursor else None
    chosen = Filter(status, collection, error, after, id_prefix)
    found = list_documents(chosen, limit + 1, resources.ocr_server)
    shown = found[:limit]
    return DocumentList(
        documents=shown, next_cursor=_encode_cursor(shown[-1]) if len(found) > limit else None
    )


def _encode_cursor(last: DocumentView) -> str:
    position = f"{last.created_at.isoformat()} {last.id}"
    return base64.urlsafe_b64encode(position.encode()).decode()


def _decode_cursor(cursor: str) -> tuple[datetime, str]:
    try:
        moment, _, document_id = base64.urlsafe_b64decode(cursor).decode("ascii").partition(" ")
        created_at = datetime.fromisoformat(moment)
        if created_at.tzinfo is None or not _ID.fullmatch(document_id):
            raise ValueError("not made by _encode_cursor")
    except ValueError as error:
        raise InvalidOptions("cursor: invalid cursor.") from error
    return created_at, document_id


@router.get(
    "/documents/{document_id}", summary="Show a document", responses=error_responses(NotFound)
)
def document(document_id: DocumentId, resources: Resources) -> DocumentView:
    """Return the document with its progress and its result.

    `status`, `pages` and `error` are those of its current run: the newest processed run, else the
    failed run with the most good pages, else the active run. `latest_run` is the newest run.
    """
    return require_document(document_id, resources)


def require_document(document_id: str, resources: ApiResources) -> DocumentView:
    """Return the document. Raises NotFound."""
    found = get_document(document_id, resources.ocr_server)
    if found is None:
        raise no_such_document(document_id)
    return found


@router.post(
    "/documents/{document_id}/cancel",
    summary="Cancel a document's run",
    responses=error_responses(NotFound),
)
def cancel(document_id: DocumentId) -> CancelView:
    """Cancel the active run. Its finished pages are kept; reprocess reuses them."""
    return CancelView(id=document_id, cancelled=deletion.cancel(document_id))


@router.delete(
    "/documents/{document_id}",
    status_code=204,
    summary="Delete a document",
    responses=error_responses(NotFound),
)
def delete(document_id: DocumentId) -> Response:
    """Cancel the run and delete the document, its pages and its bytes.

    The same file can be added again at once.
    """
    deletion.delete(document_id)
    return Response(status_code=204)
