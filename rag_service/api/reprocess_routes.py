"""The routes that redo documents: one, or all that selectors mean. Part of the API."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from functools import partial
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl

import anyio
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, SecretStr, ValidationError

from rag_service import errors
from rag_service.api import upload
from rag_service.api.document_routes import DocumentId, Word
from rag_service.api.problems import error_responses
from rag_service.api.query_parameters import KNOWN_PARAMETERS_ONLY
from rag_service.api.resources import Here
from rag_service.config.options import Settings
from rag_service.documents.decryption import unlock_stored
from rag_service.documents.reprocess import Change, check_change, reprocess
from rag_service.errors import AlreadyActive, InvalidOptions
from rag_service.knowledgebase.selection import Selectors
from rag_service.knowledgebase.views import Action, Redo
from rag_service.states import OcrMode, Priority

router = APIRouter(tags=["reprocess"], dependencies=[KNOWN_PARAMETERS_ONLY])

_BODY_BYTES = 64 * 1024
_MOST_IDS = 1000
_MOST_DPI = 10_000


_Body = TypeVar("_Body", bound="_Changes")


class _Changes(BaseModel):
    """How the new runs differ; what is left out stays as it was."""

    model_config = ConfigDict(extra="forbid")

    parser: Word | None = None
    ocr: Word | None = Field(None, json_schema_extra={"enum": [mode.value for mode in OcrMode]})
    all_pages: bool = Field(False, description="Read good pages again too.")
    pages: Word | None = Field(
        None, description="These pages alone; other good ones stay.", examples=["3,7-9"]
    )
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
            pages=self.pages,
        )


class RedoOne(_Changes):
    """The body of `POST /documents/{id}/reprocess`; all of it may be left out."""

    password: SecretStr | None = Field(
        None, description="Opens an encrypted PDF once; it is not kept."
    )


class RedoMany(_Changes):
    """The body of `POST /reprocess`. All that is given narrows the documents together."""

    ids: list[Word] = Field([], max_length=_MOST_IDS)
    failed: bool = Field(False, description="Documents whose newest run failed.")
    error: Word | None = Field(None, description="Error code of the newest run or of a page.")
    collection: Word | None = None
    since: AwareDatetime | None = Field(
        None, description="Documents whose newest run ended at or after this time."
    )
    before: AwareDatetime | None = Field(
        None, description="Documents whose newest run ended before this time."
    )
    parser_was: Word | None = Field(None, description="Documents whose text is this parser's.")
    truncated: bool = Field(False, description="Pages whose text was cut.")
    model_was: Word | None = Field(None, description="Pages that this model read.")
    engine_was: Word | None = Field(None, description="Pages that this engine read.")
    version_was: Word | None = Field(None, description="Pages of this version of the parser.")
    dpi_was: int | None = Field(
        None, ge=1, le=_MOST_DPI, description="Pages drawn at this resolution."
    )
    dry_run: bool = Field(False, description="Say what would be done, and do nothing.")

    def selectors(self) -> Selectors:
        given = {field.name: getattr(self, field.name) for field in fields(Selectors)}
        return Selectors(**given | {"ids": tuple(self.ids)})


class RedoList(BaseModel):
    """What became of each selected document, and how many met the same fate."""

    documents: list[Redo]
    counts: dict[Action, int]
    dry_run: bool


_JSON = "application/json"
_FORM = "application/x-www-form-urlencoded"
_MULTIPART = "multipart/form-data"


def _described(model: type[BaseModel], *kinds: str) -> dict[str, Any]:
    """A body that we read ourselves, with a limit, for OpenAPI."""
    schema = model.model_json_schema()
    return {"requestBody": {"content": {kind: {"schema": schema} for kind in kinds}}}


@router.post(
    "/documents/{document_id}/reprocess",
    status_code=202,
    response_model=Redo,
    summary="Redo a document",
    openapi_extra=_described(RedoOne, _JSON, _FORM, _MULTIPART),
    responses={
        200: {"model": Redo, "description": "Nothing to redo, or no such page; no run was made."},
        **error_responses(
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
    if kind == _MULTIPART:
        names = tuple(RedoOne.model_fields)
        async with upload.received(request, settings, names, takes_file=False) as form:
            return _checked(RedoOne, form.fields)
    body = await upload.body_of(request, _BODY_BYTES)
    if kind == _FORM:
        return _checked(RedoOne, dict(parse_qsl(body.decode("latin-1"))))
    return _checked(RedoOne, body or b"{}")


def _checked(model: type[_Body], body: bytes | dict[str, str]) -> _Body:
    """JSON, or a form's fields, of which empty ones count as left out."""
    try:
        if isinstance(body, bytes):
            return model.model_validate_json(body)
        return model.model_validate({name: value for name, value in body.items() if value})
    except ValidationError as error:
        found = [f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors()]
        # Not `from error`: it repeats the values, and one of them may be the password.
        raise InvalidOptions("; ".join(found)) from None


async def _wanted_of_many(request: Request) -> RedoMany:
    return _checked(RedoMany, await upload.body_of(request, _BODY_BYTES))


@router.post(
    "/reprocess",
    summary="Redo many documents",
    openapi_extra=_described(RedoMany, _JSON),
    responses=error_responses(errors.NotFound, errors.InvalidOptions, errors.TooLarge),
)
def redo_documents(wanted: Annotated[RedoMany, Depends(_wanted_of_many)], here: Here) -> RedoList:
    """Make a new run for each selected document that has something to redo.

    Documents at work are skipped and counted. Documents that ended `worker_crashed` are redone
    by id only. At least one selector is needed. Selectors about pages look at the text that
    answers now: pages that fit all of them are read again, the documents' other good pages stay.
    """
    redone = reprocess(here.settings, wanted.selectors(), wanted.checked(), dry_run=wanted.dry_run)
    counts = Counter(redo.action for redo in redone)
    return RedoList(documents=redone, counts=dict(counts), dry_run=wanted.dry_run)
