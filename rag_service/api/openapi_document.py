"""The API's OpenAPI document: what FastAPI derives from the routes, made true for every answer.

Errors are problem details, not FastAPI's own form; the bearer key, HEAD and the headers of answers
are named; each answer in JSON has an example.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from rag_service import errors
from rag_service.api.answer_examples import EXAMPLES
from rag_service.api.problems import MEDIA_TYPE, Problem, error_responses

_KEY = "key"
_PROBLEM = {"$ref": "#/components/schemas/Problem"}
_JSON = "application/json"
# Schemas of FastAPI's own answer to an invalid request, which problems.install() replaces.
_REPLACED = ("HTTPValidationError", "ValidationError")
# Operations that need no key.
_OPEN = ("/health/live", "/webhooks/runpod/{token}")
_RETRY_AFTER = {
    "description": "Seconds after which to try again.", "schema": {"type": "integer"}
}  # fmt: skip
_ALLOW = {"description": "The methods that the path takes.", "schema": {"type": "string"}}
# What any operation may answer. A path has only one answer to a wrong method.
_EVERYWHERE = (errors.InvalidOptions, errors.MethodNotAllowed, errors.Internal)
_EVERYWHERE_STATUSES = (422, 405, 500)


def install(app: FastAPI) -> None:
    """Make app.openapi() return the corrected document; it is made once."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    schemas = document["components"]["schemas"]
    for name in _REPLACED:
        schemas.pop(name, None)
    schemas[Problem.__name__] = Problem.model_json_schema(
        ref_template="#/components/schemas/{model}"
    )
    schemas |= schemas[Problem.__name__].pop("$defs", {})
    document["components"]["securitySchemes"] = {
        _KEY: {"type": "http", "scheme": "bearer", "description": "RAG_SERVICE_API_KEY, if set."}
    }
    for path, operation in _operations(document):
        operation["security"] = [] if path in _OPEN else [{_KEY: []}, {}]
        _complete_errors(operation)
        _add_examples(operation)
    return document


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            yield path, operation


def _complete_errors(operation: dict[str, Any]) -> None:
    """Give every error status the form of a problem, with its headers."""
    responses = operation["responses"]
    for status, general in error_responses(*_EVERYWHERE).items():
        if status not in _EVERYWHERE_STATUSES:
            continue
        own = responses.setdefault(str(status), {"description": general["description"]})
        examples = general["content"][MEDIA_TYPE]["examples"]
        found = own.setdefault("content", {}).setdefault(MEDIA_TYPE, {}).get("examples", {})
        own["content"][MEDIA_TYPE]["examples"] = examples | found
    for status, response in responses.items():
        content = response.get("content", {})
        if MEDIA_TYPE in content:
            response["content"] = {MEDIA_TYPE: {"schema": _PROBLEM, **content[MEDIA_TYPE]}}
        if status == "503":
            response["headers"] = {"Retry-After": _RETRY_AFTER}
        if status == "405":
            response["headers"] = {"Allow": _ALLOW}


def _add_examples(operation: dict[str, Any]) -> None:
    for response in operation["responses"].values():
        answer = response.get("content", {}).get(_JSON, {})
        name = answer.get("schema", {}).get("$ref", "").rpartition("/")[2]
        if name in EXAMPLES:
            answer["example"] = EXAMPLES[name]
