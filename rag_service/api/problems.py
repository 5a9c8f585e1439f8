"""Errors as RFC 9457 problem details with our `code`. Used by every route and middleware."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rag_service import errors
from rag_service.database.engine import (
    DatabaseError,
    error_summary,
    is_outage,
    needs_migration,
    postgres_message,
)
from rag_service.errors import RagServiceError, StorageUnavailable

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
# What web servers write in their logs for a client that hung up; nobody receives it.
CLIENT_GONE = 499
_RETRY_SECONDS = 5
_BACKLOG_RETRY_SECONDS = 30
_INTERNAL = "An error of ours; the log has the details."

# The nearest class of an error's ancestry decides.
_STATUS: Mapping[type[Exception], int] = {
    errors.UnsupportedType: 415,
    errors.TooLarge: 413,
    errors.StorageUnavailable: 503,
    errors.SourceMissing: 404,
    errors.Internal: 500,
    errors.DocumentError: 422,
    errors.PageError: 422,
    errors.Unauthorized: 401,
    errors.NotFound: 404,
    errors.InvalidOptions: 422,
    errors.OptionsDiffer: 409,
    errors.AlreadyActive: 409,
    errors.BacklogFull: 503,
    errors.ConfigurationError: 503,
    errors.ServiceUnreachable: 503,
    RagServiceError: 500,
}


class FieldProblem(BaseModel):
    """One value that was not valid, and why; the value itself is not repeated."""

    field: str
    message: str


class Problem(BaseModel):
    """Problem details (RFC 9457). `code` is ours and stable; `detail` is for people."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str = Field(examples=["not_found"])
    retryable: bool = Field(False, description="The same request may succeed later.")
    errors: list[FieldProblem] | None = None


def answer(
    status: int,
    code: str,
    detail: str,
    *,
    retryable: bool = False,
    fields: list[FieldProblem] | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """A problem as a response."""
    problem = Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        code=code,
        retryable=retryable,
        errors=fields,
    )
    return JSONResponse(
        problem.model_dump(exclude_none=True), status, dict(headers or {}), MEDIA_TYPE
    )


def answer_error(error: RagServiceError) -> JSONResponse:
    """One of our errors as a response; what is not the caller's to know stays in the log."""
    status = next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("A request failed", exc_info=error)
        return answer(status, "internal", _INTERNAL)
    return answer(
        status,
        error.code,
        error.message,
        retryable=error.retryable,
        headers=_headers(error, status),
    )


def _headers(error: RagServiceError, status: int) -> dict[str, str]:
    if status == HTTPStatus.UNAUTHORIZED:
        return {"WWW-Authenticate": 'Bearer realm="rag_service"'}
    if isinstance(error, errors.BacklogFull):
        return {"Retry-After": str(_BACKLOG_RETRY_SECONDS)}
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return {"Retry-After": str(_RETRY_SECONDS)}
    return {}


def forbidden(what: str) -> JSONResponse:
    """A stranger's request to a service that has no key."""
    detail = f"{what}. Without RAG_SERVICE_API_KEY only programs on this machine may ask."
    return answer(403, errors.Unauthorized.code, detail)


def documented(*kinds: type[RagServiceError]) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may raise these, with an example each, for OpenAPI."""
    responses: dict[int | str, dict[str, Any]] = {}
    examples = [answer_error(kind()) for kind in (*kinds, errors.Unauthorized)]
    for example in (
        *examples,
        forbidden("The Host 'a.example' is not ours"),
        answer_error(StorageUnavailable()),
    ):
        status = example.status_code
        found = responses.setdefault(
            status,
            {
                "model": Problem,
                "description": HTTPStatus(status).phrase,
                "content": {MEDIA_TYPE: {"examples": {}}},
            },
        )
        value = _loaded(example)
        found["content"][MEDIA_TYPE]["examples"][value["code"]] = {"value": value}
    return responses


def _loaded(response: JSONResponse) -> Any:
    return Problem.model_validate_json(bytes(response.body)).model_dump(exclude_none=True)


def install(app: FastAPI) -> None:
    """Let every error that a route raises become a problem."""
    app.add_exception_handler(RagServiceError, _ours)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(DatabaseError, _database)
    app.add_exception_handler(ClientDisconnect, _gone)


async def _ours(_: Request, error: Exception) -> Response:
    if not isinstance(error, RagServiceError):
        raise error
    return answer_error(error)


async def _invalid(_: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    fields = [
        FieldProblem(field=_place(found["loc"]), message=found["msg"]) for found in error.errors()
    ]
    detail = "; ".join(f"{field.field}: {field.message}" for field in fields)
    return answer(422, errors.InvalidOptions.code, detail, fields=fields)


def _place(location: Sequence[str | int]) -> str:
    """A field's name without where it came from; unreadable JSON has a position instead."""
    names = [str(part) for part in location[1:]]
    return ".".join(names) if names and not names[0].isdecimal() else str(location[0])


async def _http(_: Request, error: Exception) -> Response:
    """What the router itself answers: no such path, no such method, unreadable JSON."""
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == HTTPStatus.NOT_FOUND:
        return answer(404, errors.NotFound.code, "There is nothing at this address.")
    bad_body = error.status_code == HTTPStatus.BAD_REQUEST
    status = HTTPStatus.UNPROCESSABLE_ENTITY if bad_body else error.status_code
    return answer(status, errors.InvalidOptions.code, error.detail, headers=error.headers)


async def _database(_: Request, error: Exception) -> Response:
    if not isinstance(error, DatabaseError):
        raise error
    if is_outage(error):
        log.warning("The database did not do its part: %s", error_summary(error))
        return answer_error(StorageUnavailable(_outage(error)))
    if needs_migration(error):
        return answer_error(
            StorageUnavailable("The database is not migrated: run `rag-service migrate`.")
        )
    raise error


def _outage(error: DatabaseError) -> str:
    """Its own reason where it gave one; never the address where it was looked for."""
    reason = postgres_message(error)
    if reason is None:
        return "The database cannot be reached."
    return f"The database did not do its part: {reason}."


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


class CatchAll:
    """The last resort: an unexpected error is logged whole and answered without its details."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            if started or scope["type"] != "http":
                raise
            log.exception("A request failed inside the server")
            await answer(500, errors.Internal.code, _INTERNAL)(scope, receive, send)
