"""Errors as RFC 9457 problem details with a stable `code`: the one way in which the API refuses."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rag_service import errors
from rag_service.config.explanations import message_of
from rag_service.database.engine import DatabaseError, as_unavailable, error_summary
from rag_service.errors import RagServiceError
from rag_service.runtime.process_resources import shortage_in

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
# nginx's status for a client that closed its connection; it appears in metrics only.
CLIENT_CLOSED_REQUEST = 499
_RETRY_SECONDS = 5
_BACKLOG_RETRY_SECONDS = 30
_SHOWN_PATH_LETTERS = 100

# The nearest class in an error's method resolution order decides.
_STATUS: Mapping[type[Exception], int] = {
    errors.UnsupportedType: 415,
    errors.TooLarge: 413,
    errors.StorageUnavailable: 503,
    errors.DatabaseUnavailable: 503,
    errors.SourceMissing: 404,
    errors.Internal: 500,
    errors.DocumentError: 422,
    errors.PageError: 422,
    errors.Unauthorized: 401,
    errors.Forbidden: 403,
    errors.NotFound: 404,
    errors.MethodNotAllowed: 405,
    errors.InvalidOptions: 422,
    errors.OptionsDiffer: 409,
    errors.AlreadyActive: 409,
    errors.BacklogFull: 503,
    errors.Busy: 503,
    errors.ConfigurationError: 503,
    errors.ServiceUnreachable: 503,
    errors.ProcessInTrouble: 503,
    RagServiceError: 500,
}
# What any operation may answer, whatever it does.
_GENERAL = (
    errors.Unauthorized,
    errors.Forbidden,
    errors.StorageUnavailable,
    errors.DatabaseUnavailable,
)


class FieldProblem(BaseModel):
    """A value that is not valid, and why. The value itself is not repeated."""

    field: str = Field(description="The name of the field.")
    message: str = Field(description="Why its value is not valid.")


class Problem(BaseModel):
    """Problem details (RFC 9457). `code` is stable; `detail` is a sentence for people."""

    type: str = Field(default="about:blank", description="Always about:blank: the code says more.")
    title: str = Field(description="The name of the HTTP status.")
    status: int = Field(description="The HTTP status.")
    detail: str = Field(description="What went wrong, as a sentence; its wording may change.")
    code: str = Field(
        description="What went wrong, as a stable code. Codes may be added.",
        examples=["not_found"],
    )
    retryable: bool = Field(False, description="The same request may succeed later.")
    errors: list[FieldProblem] | None = Field(
        None, description="With `invalid_options`: the fields that are not valid."
    )


def problem_response(
    status: int,
    code: str,
    detail: str,
    *,
    retryable: bool = False,
    fields: list[FieldProblem] | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Return a problem as a response."""
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


def error_response(
    error: RagServiceError, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return the error as a response. The text of a server error (500) goes to the log only."""
    if _status_of(error) == HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("A request failed", exc_info=error)
        error = errors.Internal()
    return _response_of(error, headers)


def _status_of(error: RagServiceError) -> int:
    return next(_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS)


def _response_of(error: RagServiceError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    status = _status_of(error)
    return problem_response(
        status,
        error.code,
        error.message,
        retryable=error.retryable,
        headers={**_headers(error, status), **(headers or {})},
    )


def _headers(error: RagServiceError, status: int) -> dict[str, str]:
    if status == HTTPStatus.UNAUTHORIZED:
        return {"WWW-Authenticate": 'Bearer realm="rag_service"'}
    if isinstance(error, errors.BacklogFull):
        return {"Retry-After": str(_BACKLOG_RETRY_SECONDS)}
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return {"Retry-After": str(_RETRY_SECONDS)}
    return {}


def error_responses(*classes: type[RagServiceError]) -> dict[int | str, dict[str, Any]]:
    """Return a route's `responses` for OpenAPI: these errors and the general ones, by status.

    Each error's code names an example.
    """
    responses: dict[int | str, dict[str, Any]] = {}
    for example in (_response_of(cls()) for cls in (*classes, *_GENERAL)):
        status = example.status_code
        found = responses.setdefault(
            status,
            {
                "model": Problem,
                "description": HTTPStatus(status).phrase,
                "content": {MEDIA_TYPE: {"examples": {}}},
            },
        )
        value = _body_of(example)
        found["content"][MEDIA_TYPE]["examples"][value["code"]] = {"value": value}
    return responses


def _body_of(response: JSONResponse) -> Any:
    return Problem.model_validate_json(bytes(response.body)).model_dump(exclude_none=True)


def install(app: FastAPI, routes: Iterable[BaseRoute]) -> None:
    """Make every error that a route or the router raises a problem response.

    `routes`: all routes of the app, for the Allow header of a 405.
    """
    known_routes = [route for route in routes if isinstance(route, Route)]

    async def answer_router_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        return _router_problem(request, error, known_routes)

    app.add_exception_handler(HTTPException, answer_router_error)
    app.add_exception_handler(RagServiceError, _answer_own_error)
    app.add_exception_handler(RequestValidationError, _answer_invalid_request)
    app.add_exception_handler(DatabaseError, _answer_database_error)
    app.add_exception_handler(ClientDisconnect, _answer_disconnect)


async def _answer_own_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, RagServiceError):
        raise error
    return error_response(error)


async def _answer_invalid_request(_: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    fields = [
        FieldProblem(field=_field_name(found["loc"]), message=message_of(found))
        for found in error.errors()
    ]
    detail = "; ".join(f"{field.field}: {field.message}" for field in fields)
    return problem_response(422, errors.InvalidOptions.code, detail, fields=fields)


def _field_name(location: Sequence[str | int]) -> str:
    """Return the name without `query` or `body`; invalid JSON has a position instead of a name."""
    names = [str(part) for part in location[1:]]
    return ".".join(names) if names and not names[0].isdecimal() else str(location[0])


def _router_problem(
    request: Request, error: HTTPException, routes: Sequence[Route]
) -> JSONResponse:
    """Return the answer to a request that reached no route, or whose body is not readable."""
    path = request.url.path[:_SHOWN_PATH_LETTERS]
    if error.status_code == HTTPStatus.NOT_FOUND:
        return error_response(errors.NotFound(f"No route {path}; /docs lists the routes."))
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = _allowed_methods(request.scope, error, routes)
        refusal = errors.MethodNotAllowed(f"{path} takes {allowed}, not {request.method}.")
        return error_response(refusal, {"Allow": allowed})
    bad_body = error.status_code == HTTPStatus.BAD_REQUEST
    status = HTTPStatus.UNPROCESSABLE_ENTITY if bad_body else error.status_code
    return problem_response(status, errors.InvalidOptions.code, error.detail, headers=error.headers)


def _allowed_methods(scope: Scope, error: HTTPException, routes: Sequence[Route]) -> str:
    """Return an Allow header. The router's own header names the first matching route only."""
    methods = set((error.headers or {}).get("Allow", "").split(", ")) - {""}
    for route in routes:
        if route.matches(scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    if "GET" in methods:
        # HeadRequests answers it.
        methods.add("HEAD")
    return ", ".join(sorted(methods))


async def _answer_database_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, DatabaseError):
        raise error
    outage = as_unavailable(error)
    if outage is None:
        raise error
    log.warning("PostgreSQL error: %s", error_summary(error))
    return error_response(outage)


async def _answer_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


class CatchAll:
    """Middleware: log an unexpected error with its traceback, answer it without its details."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_and_note_start(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note_start)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            log.exception("A request failed inside the server")
            await _internal_response(error)(scope, receive, send)


def _internal_response(error: Exception) -> JSONResponse:
    """Return 503 if the process lacked descriptors, threads or memory for the request, else 500."""
    short = shortage_in(error)
    if short is not None:
        message = f"The API process is short of a resource: {short}. Try again later."
        return error_response(errors.ProcessInTrouble(message))
    internal = errors.Internal
    return problem_response(500, internal.code, internal.default_message)
