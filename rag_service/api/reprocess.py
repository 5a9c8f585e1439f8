"""The routes that redo documents: one, or all that selectors mean. Part of the API."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import anyio
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from rag_service import errors
from rag_service.api import upload
from rag_service.api.documents import DocumentId, Word, require_id
from rag_service.api.problems import documented
from rag_service.api.services import Here
from rag_service.errors import AlreadyActive, InvalidOptions
from rag_service.knowledgebase.selection import Selectors
from rag_service.knowledgebase.views import Action, Redo
from rag_service.reprocess import Change, check_change, reprocess
from rag_service.settings import Settings
from rag_service.states import OcrMode, Priority
from rag_service.unlock import unlock_stored

router = APIRouter(tags=["reprocess"])

_BODY_BYTES = 64 * 1024
_MOST_IDS = 1000


class _Changes(BaseModel):
    """How the new runs differ; what is left out stays as it was."""

    model_config = ConfigDict(extra="forbid")

    parser: Word | None = None
    ocr: OcrMode | None = None
    all_pages: bool = Field(False, description="Read good pages again too.")
    priority: str = Field(
        Priority.BULK.name.lower(), pattern="^(interactive|bulk)$", examples=["bulk"]
    )

    def checked(self) -> Change:
        """Raises InvalidOptions."""
        return check_change(
            parser=self.parser,
            ocr=self.ocr,
            all_pages=self.all_pages,
            priority=Priority[self.priority.upper()],
        )


class RedoOne(_Changes):
    """The body of `POST /documents/{id}/reprocess`; all of it may be left out."""

    password: SecretStr | None = Field(
        None, description="Opens an encrypted PDF once; it is not kept."
    )


class RedoMany(_Changes):
    """The body of `POST /reprocess`. `ids` stand alone; the others narrow all documents."""

    ids: list[str] = Field([], max_length=_MOST_IDS)
    failed: bool = Field(False, description="Documents whose newest run failed.")
    error: Word | None = Field(None, description="Error code of the newest run or of a page.")
    collection: Word | None = None
    dry_run: bool = Field(False, description="Say what would be done, and do nothing.")

    def selectors(self) -> Selectors:
        """Raises NotFound for an id that no document can have."""
        ids = tuple(require_id(document_id) for document_id in self.ids)
        return Selectors(ids, self.failed, self.error, self.collection)


class RedoList(BaseModel):
    """What became of each selected document, and how many met the same fate."""

    documents: list[Redo]
    counts: dict[Action, int]
    dry_run: bool


_ONE_BODY: dict[str, Any] = {
    "requestBody": {
        "content": {
            kind: {"schema": RedoOne.model_json_schema()}
            for kind in (
                "application/json",
                "multipart/form-data",
                "application/x-www-form-urlencoded",
            )
        }
    }
}


@router.post(
    "/documents/{document_id}/reprocess",
    status_code=202,
    response_model=Redo,
    summary="Redo a document",
    openapi_extra=_ONE_BODY,
    responses={
        200: {"model": Redo, "description": "There is nothing to redo; no run was made."},
        **documented(
            errors.NotFound, errors.AlreadyActive, errors.InvalidOptions, errors.WrongPassword
        ),
    },
)
async def redo_document(document_id: DocumentId, request: Request, here: Here) -> JSONResponse:
    """Make a new run. Good pages that were read with the same options are taken over; the text
    that is there answers until the new run has ended.
    """
    wanted = await _wanted(request, here.settings)
    change = wanted.checked()
    if wanted.password is not None:
        store = await anyio.to_thread.run_sync(lambda: here.store)
        password = wanted.password.get_secret_value()
        await unlock_stored(here.settings, store, document_id, password)
    selectors = Selectors(ids=(document_id,))
    [redo] = await anyio.to_thread.run_sync(partial(reprocess, here.settings, selectors, change))
    if redo.action is Action.SKIPPED_ACTIVE:
        raise AlreadyActive()
    return JSONResponse(redo.model_dump(mode="json"), 202 if redo.action is Action.QUEUED else 200)


async def _wanted(request: Request, settings: Settings) -> RedoOne:
    """The body as JSON or as a form. Raises InvalidOptions, TooLarge."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        names = tuple(RedoOne.model_fields)
        async with upload.received(request, settings, names, takes_file=False) as form:
            return _checked(form.fields)
    body = await upload.body_of(request, _BODY_BYTES)
    if kind == "application/x-www-form-urlencoded":
        return _checked(dict(parse_qsl(body.decode("latin-1"))))
    return _checked(body or b"{}")


def _checked(body: bytes | dict[str, str]) -> RedoOne:
    try:
        if isinstance(body, bytes):
            return RedoOne.model_validate_json(body)
        return RedoOne.model_validate({name: value for name, value in body.items() if value})
    except ValidationError as error:
        found = [f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors()]
        # Not `from error`: it repeats the values, and one of them may be the password.
        raise InvalidOptions("; ".join(found)) from None


@router.post(
    "/reprocess",
    summary="Redo many documents",
    responses=documented(errors.NotFound, errors.InvalidOptions),
)
def redo_documents(wanted: RedoMany, here: Here) -> RedoList:
    """Make a new run for each selected document that has something to redo.

    Documents at work are skipped and counted. Documents that ended `worker_crashed` are redone
    by id only. At least one selector is needed.
    """
    redone = reprocess(here.settings, wanted.selectors(), wanted.checked(), dry_run=wanted.dry_run)
    counts = Counter(redo.action for redo in redone)
    return RedoList(documents=redone, counts=dict(counts), dry_run=wanted.dry_run)
