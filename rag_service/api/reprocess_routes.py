"""The routes that reprocess documents: one, or all that match selectors."""

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
from rag_service.api.document_routes import DocumentId, ShortText
from rag_service.api.problems import error_responses
from rag_service.api.query_parameters import KNOWN_PARAMETERS_ONLY
from rag_service.api.resources import Resources
from rag_service.config.explanations import message_of
from rag_service.config.options import Settings
from rag_service.documents.bulk_reprocess import AT_ONCE, start_if_large
from rag_service.documents.decryption import unlock_stored
from rag_service.documents.intake import require_backlog_space
from rag_service.documents.reprocess import (
    Change,
    check_change,
    reprocess,
    selected_documents,
)
from rag_service.errors import AlreadyActive, InvalidOptions
from rag_service.knowledgebase.reprocess_jobs import get_job
from rag_service.knowledgebase.selection import Selectors
from rag_service.knowledgebase.views import Action, Redo, ReprocessJobView
from rag_service.parsers.registry import PARSERS
from rag_service.states import OcrMode, Priority

router = APIRouter(tags=["reprocess"], dependencies=[KNOWN_PARAMETERS_ONLY])

# The most ids, each of the longest accepted length, fit.
_BODY_BYTES = 512 * 1024
_MOST_IDS = 1000
_MOST_DPI = 10_000


_Body = TypeVar("_Body", bound="_Changes")


class _Changes(BaseModel):
    """The options of the new runs. An option that is left out stays as it was."""

    model_config = ConfigDict(extra="forbid")

    parser: ShortText | None = Field(
        None,
        description="The parser that reads the pages.",
        json_schema_extra={"enum": [*sorted(PARSERS)]},
    )
    ocr: ShortText | None = Field(
        None,
        description="Pages that the OCR server reads.",
        json_schema_extra={"enum": [mode.value for mode in OcrMode]},
    )
    all_pages: bool = Field(False, description="Also read good pages again.")
    pages: ShortText | None = Field(
        None,
        description="Read only these pages again; other good pages are kept.",
        examples=["3,7-9"],
        json_schema_extra={"pattern": "^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$"},
    )
    priority: str = Field(
        Priority.BULK.name.lower(),
        pattern="^(interactive|bulk)$",
        description="interactive runs are claimed before bulk runs.",
        json_schema_extra={"enum": [p.name.lower() for p in Priority]},
    )

    def checked(self) -> Change:
        """Return the checked change. Raises InvalidOptions."""
        return check_change(
            parser=self.parser,
            ocr=self.ocr,
            all_pages=self.all_pages,
            priority=Priority[self.priority.upper()],
            pages=self.pages,
        )


class ReprocessBody(_Changes):
    """The body of `POST /documents/{id}/reprocess`. Every field is optional."""

    password: SecretStr | None = Field(
        None, description="Opens an encrypted PDF. It is used once and not stored."
    )


class ReprocessManyBody(_Changes):
    """The body of `POST /reprocess`. A document must match all selectors that are given."""

    ids: list[ShortText] = Field([], max_length=_MOST_IDS, description="Documents with these ids.")
    failed: bool = Field(False, description="Documents whose newest run failed.")
    error: ShortText | None = Field(
        None,
        description="Error code of the newest run or of a page.",
        json_schema_extra={"enum": [*sorted(errors.outcome_codes())]},
    )
    collection: ShortText | None = Field(None, description="Documents of this collection.")
    since: AwareDatetime | None = Field(
        None, description="Documents whose newest run ended at or after this time."
    )
    before: AwareDatetime | None = Field(
        None, description="Documents whose newest run ended before this time."
    )
    parser_was: ShortText | None = Field(None, description="Documents that this parser read.")
    truncated: bool = Field(False, description="Pages whose text stops at the token limit.")
    model_was: ShortText | None = Field(None, description="Pages that this model read.")
    engine_was: ShortText | None = Field(None, description="Pages that this engine read.")
    version_was: ShortText | None = Field(
        None, description="Pages that this version of the parser read."
    )
    dpi_was: int | None = Field(
        None, ge=1, le=_MOST_DPI, description="Pages that were rendered at this resolution."
    )
    dry_run: bool = Field(False, description="Only return what would be done.")

    def selectors(self) -> Selectors:
        given = {field.name: getattr(self, field.name) for field in fields(Selectors)}
        return Selectors(**given | {"ids": tuple(self.ids)})


class ReprocessList(BaseModel):
    """The action for each selected document, and the number of documents for each action."""

    documents: list[Redo] = Field(
        description=f"The selected documents, oldest first; of a dry run the first {_MOST_IDS}."
    )
    selected: int = Field(description="The number of selected documents.")
    counts: dict[Action, int] = Field(description="Number of these `documents` by action.")
    dry_run: bool = Field(description="Nothing was changed.")


_JSON = "application/json"
_FORM = "application/x-www-form-urlencoded"
_MULTIPART = "multipart/form-data"


def _body_schema(model: type[BaseModel], *kinds: str) -> dict[str, Any]:
    """Return the OpenAPI schema of a body that the route reads itself, with a size limit."""
    schema = model.model_json_schema()
    return {"requestBody": {"content": {kind: {"schema": schema} for kind in kinds}}}


@router.post(
    "/documents/{document_id}/reprocess",
    status_code=202,
    response_model=Redo,
    summary="Reprocess a document",
    openapi_extra=_body_schema(ReprocessBody, _JSON, _FORM, _MULTIPART),
    responses={
        200: {
            "model": Redo,
            "description": "Nothing to read again, or no such page; no run was added.",
        },
        **error_responses(
            errors.NotFound,
            errors.AlreadyActive,
            errors.InvalidOptions,
            errors.WrongPassword,
            errors.BacklogFull,
        ),
    },
)
async def redo_document(
    document_id: DocumentId, request: Request, resources: Resources
) -> JSONResponse:
    """Add a new run. Good pages that were read with the same options are reused. Until the new
    run has ended, the document shows the text of its current run.
    """
    body = await _read_one(request, resources.settings)
    change = body.checked()
    await anyio.to_thread.run_sync(require_backlog_space, resources.settings, change.priority)
    if body.password is not None:
        store = await anyio.to_thread.run_sync(lambda: resources.store)
        password = body.password.get_secret_value()
        await unlock_stored(resources.settings, store, document_id, password)
    selectors = Selectors(ids=(document_id,))
    [redo] = await anyio.to_thread.run_sync(
        partial(reprocess, resources.settings, selectors, change)
    )
    if redo.action is Action.SKIPPED_ACTIVE:
        raise AlreadyActive()
    return JSONResponse(redo.model_dump(mode="json"), 202 if redo.action is Action.QUEUED else 200)


async def _read_one(request: Request, settings: Settings) -> ReprocessBody:
    """Return the body, which is JSON or a form. Raises InvalidOptions, TooLarge."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == _MULTIPART:
        names = tuple(ReprocessBody.model_fields)
        async with upload.receive_form(request, settings, names) as form:
            return _checked(ReprocessBody, form.fields)
    body = await upload.read_body(request, _BODY_BYTES)
    if kind == _FORM:
        return _checked(ReprocessBody, dict(parse_qsl(body.decode("latin-1"))))
    return _checked(ReprocessBody, body or b"{}")


def _checked(model: type[_Body], body: bytes | dict[str, str]) -> _Body:
    """Return the body from JSON or from form fields. An empty form field counts as left out."""
    try:
        if isinstance(body, bytes):
            return model.model_validate_json(body, strict=True)
        return model.model_validate({name: value for name, value in body.items() if value})
    except ValidationError as error:
        found = [
            f"{'.'.join(map(str, e['loc'])) or 'body'}: {message_of(e)}" for e in error.errors()
        ]
        # `from None`: the original error repeats the values, and one may be the password.
        raise InvalidOptions("; ".join(found)) from None


async def _read_many(request: Request) -> ReprocessManyBody:
    return _checked(ReprocessManyBody, await upload.read_body(request, _BODY_BYTES))


@router.post(
    "/reprocess",
    summary="Reprocess many documents",
    response_model=ReprocessList,
    openapi_extra=_body_schema(ReprocessManyBody, _JSON),
    responses={
        202: {
            "model": ReprocessJobView,
            "description": "A job was added; maintenance adds the runs.",
        },
        **error_responses(errors.NotFound, errors.InvalidOptions, errors.TooLarge),
    },
)
def redo_documents(
    body: Annotated[ReprocessManyBody, Depends(_read_many)], resources: Resources
) -> JSONResponse:
    """Add a new run for each selected document that has pages to read again.

    200: at most 100 documents are selected; their runs were added. 202: more are selected, or more
    than the backlog has space for: a job was added, which adds the runs in batches while at most
    90 % of limits.max_backlog documents of its priority wait; see `GET /reprocess-jobs/{id}`.

    At least one selector is needed. Documents with an active run are skipped and counted.
    Documents that ended with `worker_crashed` are selected by id only. Selectors of pages apply
    to the current run: pages that match all of them are read again, other good pages are kept.
    """
    settings, selectors, change = resources.settings, body.selectors(), body.checked()
    if not body.dry_run and (job_id := start_if_large(settings, selectors, change)):
        job = get_job(job_id)
        location = {"Location": f"/reprocess-jobs/{job_id}"}
        return JSONResponse(job.model_dump(mode="json"), 202, location)
    most = _MOST_IDS if body.dry_run else AT_ONCE
    redone = reprocess(settings, selectors, change, dry_run=body.dry_run, most=most)
    listed = ReprocessList(
        documents=redone,
        selected=selected_documents(selectors) if len(redone) == most else len(redone),
        counts=dict(Counter(redo.action for redo in redone)),
        dry_run=body.dry_run,
    )
    return JSONResponse(listed.model_dump(mode="json"))
