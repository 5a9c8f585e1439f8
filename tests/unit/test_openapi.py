"""The API's description of itself: complete, in our words, and true to its examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rag_service.api import answer_examples
from rag_service.api.app import create_app
from rag_service.config.loader import load_settings
from rag_service.errors import outcome_codes
from rag_service.knowledgebase import views
from rag_service.states import OcrMode, PagePlan, RunState

Tree = dict[str, Any]
PROBLEM = "application/problem+json"


@pytest.fixture(scope="module")
def document() -> Tree:
    return create_app(load_settings()).openapi()


def operations(document: Tree) -> Iterator[tuple[str, Tree]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def test_every_field_has_a_description(document: Tree) -> None:
    missing = [
        f"{name}.{field}"
        for name, schema in document["components"]["schemas"].items()
        for field, found in schema.get("properties", {}).items()
        if not found.get("description")
    ]
    assert missing == []


def test_every_parameter_and_operation_has_a_description(document: Tree) -> None:
    for name, operation in operations(document):
        assert operation["summary"], name
        assert operation["description"], name
        for parameter in operation.get("parameters", []):
            schema = parameter["schema"]
            assert parameter.get("description") or schema.get("description"), (name, parameter)


def test_every_answer_in_json_has_an_example(document: Tree) -> None:
    for name, operation in operations(document):
        for status, response in operation["responses"].items():
            answer = response.get("content", {}).get("application/json")
            if answer is not None:
                assert answer.get("example"), (name, status)


def test_every_error_is_a_problem(document: Tree) -> None:
    for name, operation in operations(document):
        statuses = {status for status in operation["responses"] if status >= "400"}
        assert {"405", "422", "500"} <= statuses, name
        for status in statuses:
            kinds = set(operation["responses"][status]["content"])
            is_health = (name, status) == ("GET /health/ready", "503")
            assert kinds == ({"application/json"} if is_health else {PROBLEM}), (name, status)
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert "Allow" in document["paths"]["/documents"]["get"]["responses"]["405"]["headers"]


def test_the_key_is_described_for_every_operation_that_needs_it(document: Tree) -> None:
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for name, operation in operations(document):
        is_open = name in {"GET /health/live", "POST /webhooks/runpod/{token}"}
        assert operation["security"] == ([] if is_open else [{"key": []}, {}]), name


def test_closed_lists_of_words_are_enumerations(document: Tree) -> None:
    schemas = document["components"]["schemas"]
    for name, words in {"RunState": RunState, "OcrMode": OcrMode, "PagePlan": PagePlan}.items():
        assert set(schemas[name]["enum"]) == set(words)
    listed = document["paths"]["/documents"]["get"]["parameters"]
    [code] = [one["schema"] for one in listed if one["name"] == "error"]
    assert set(code["enum"]) == outcome_codes()


@pytest.mark.parametrize("name", [n for n in answer_examples.EXAMPLES if hasattr(views, n)])
def test_examples_are_valid(name: str) -> None:
    view: type[views.View] = getattr(views, name)
    example = answer_examples.EXAMPLES[name]
    shown = view.model_validate(example).model_dump(mode="json")
    assert set(shown) == set(example)
