"""The words for HTTP errors that all clients share, and the end of their connections."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from rag_service.runtime.http_client import (
    HttpClient,
    describe_error,
    describe_response,
    retry_after,
)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (httpx.ConnectTimeout(""), "ConnectTimeout: no connection in time"),
        (httpx.PoolTimeout(""), "PoolTimeout: no free connection in time"),
        (httpx.WriteTimeout(""), "WriteTimeout: the request was not sent in time"),
        (httpx.ReadTimeout("timed out"), "ReadTimeout: no answer in time"),
        (httpx.ConnectError("refused"), "ConnectError: refused"),
        (httpx.ReadError(""), "ReadError"),
    ],
)
def test_an_error_is_named_with_its_reason(error: httpx.RequestError, words: str) -> None:
    assert describe_error(error) == words


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("out of\n  memory", "HTTP 503: out of memory"),
        (" \n", "HTTP 503: empty body"),
        ("x" * 1000, "HTTP 503: " + "x" * 300),
    ],
)
def test_a_response_is_described_in_one_short_line(body: str, words: str) -> None:
    assert describe_response(httpx.Response(503, text=body)) == words


@pytest.mark.parametrize(("header", "seconds"), [({"Retry-After": "7"}, 7.0), ({}, None)])
def test_retry_after_is_read_from_the_response(
    header: dict[str, str], seconds: float | None
) -> None:
    assert retry_after(httpx.Response(429, headers=header)) == seconds


def test_the_connections_are_closed_with_the_context() -> None:
    async def use() -> bool:
        http = httpx.AsyncClient()
        async with HttpClient(http) as client:
            assert isinstance(client, HttpClient)
            assert not http.is_closed
        return http.is_closed

    assert asyncio.run(use())
