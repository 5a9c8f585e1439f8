"""What the HTTP clients of other services share: certificates, lifetime, words for errors."""

from __future__ import annotations

import re
import ssl
from functools import cache
from types import TracebackType
from typing import Self

import httpx

from rag_service.runtime.retry import parse_http_date, parse_retry_after

# The beginning of a web page; its title, if there is one, is the first group.
_HTML = re.compile(
    r"\s*<(?:!doctype html|html)\b(?:.*?<title[^>]*>([^<]{1,200}))?", re.IGNORECASE | re.DOTALL
)
_EXCERPT_LETTERS = 300
_TIMEOUTS = (
    (httpx.ConnectTimeout, "no connection in time"),
    (httpx.PoolTimeout, "no free connection in time"),
    (httpx.WriteTimeout, "the request was not sent in time"),
    (httpx.ReadTimeout, "no answer in time"),
)


class HttpClient:
    """The base of a service's client: an httpx.AsyncClient that is closed with the context."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()


@cache
def trusted_certificates() -> ssl.SSLContext:
    """Return the certificates that httpx trusts by default. It is shared: do not change it.

    Reading them takes about 20 ms of CPU, so it is done once per process, not once per client.
    """
    return httpx.create_ssl_context()


def describe_error(error: Exception) -> str:
    """Return why a request brought no response, like `ReadTimeout: no answer in time`."""
    words = next((words for cls, words in _TIMEOUTS if isinstance(error, cls)), str(error))
    return f"{type(error).__name__}: {words}".removesuffix(": ")


def describe_response(response: httpx.Response) -> str:
    """Return the status and the beginning of the body, like `HTTP 503: overloaded`."""
    return f"HTTP {response.status_code}: {excerpt(response)}"


def excerpt(response: httpx.Response) -> str:
    """Return the beginning of the body as one line; of a web page its title."""
    if page := _HTML.match(response.text):
        return f"a web page, {' '.join(page[1].split())!r}" if page[1] else "a web page"
    return " ".join(response.text.split())[:_EXCERPT_LETTERS] or "empty body"


def retry_after(response: httpx.Response) -> float | None:
    """Return the seconds of the Retry-After header, or None if there is no readable one.

    A date in it is by the server's clock, which is in its Date header.
    """
    now = parse_http_date(response.headers.get("Date"))
    return parse_retry_after(response.headers.get("Retry-After"), now)
