"""The client of the layout server, one a job. Used by parsers, the supervisor and health.

It loads no model: a fork that asks holds only the bytes of the pictures it sends.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

import httpx
from pydantic import BaseModel, ValidationError

from rag_service.config.options import Settings
from rag_service.errors import LayoutUnavailable, PageUnrenderable
from rag_service.layout.address import Address, layout_address
from rag_service.layout.page_layout import Bbox, LayoutBox, PageLayout
from rag_service.runtime.certificates import trusted

# A server that died is back after about a second.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_CONNECT_SECONDS = 5.0
_READY_SECONDS = 5.0
_BUSY = 429
_NOT_READY = 503


class Readiness(BaseModel):
    """`ok` once the model is loaded; `message` says what is amiss where it is not."""

    ok: bool
    model: str | None = None
    message: str = ""


class _Found(BaseModel):
    label: str
    score: float
    bbox: Bbox


class _Answer(BaseModel):
    model: str
    boxes: list[_Found]

    def layout(self) -> PageLayout:
        boxes = tuple(LayoutBox(box.label, box.score, box.bbox) for box in self.boxes)
        return PageLayout(boxes, self.model)


class LayoutClient:
    """Requests to the layout server, closed with the context."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigurationError where the socket's place is not ours."""
        self._address = layout_address(settings)
        self._patience = settings.layout.outage_limit
        socket = self._address.socket
        self._http = httpx.AsyncClient(
            base_url=self._address.url,
            transport=httpx.AsyncHTTPTransport(
                uds=str(socket) if socket else None,
                limits=httpx.Limits(max_connections=None),
                verify=trusted(),
            ),
            trust_env=False,
            verify=trusted(),
        )

    async def __aenter__(self) -> LayoutClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def find(self, jpeg: bytes) -> PageLayout:
        """The layout of the page in the picture.

        A request that the server's death cut off is sent again: nothing is stored on the way, so
        asking twice is harmless. Raises LayoutUnavailable where the server gave no sign of life
        for layout.outage_limit seconds or failed on this picture, and PageUnrenderable where it
        refuses the picture.
        """
        pause = _FIRST_PAUSE
        deadline = time.monotonic() + self._patience
        while True:
            try:
                response = await self._ask(jpeg, deadline)
                if response.status_code == _BUSY:
                    deadline = time.monotonic() + self._patience
                elif response.status_code != _NOT_READY:
                    return _layout(response)
                trouble = response.text
            except httpx.TransportError as error:
                trouble = _in_words(error)
            if time.monotonic() + pause > deadline:
                raise LayoutUnavailable(
                    f"The layout server at {self._address} did not answer for "
                    f"{self._patience:g} s: {trouble}"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def ready(self) -> Readiness:
        """Whether the server would answer now."""
        try:
            return _readiness(await self._http.get("/health", timeout=_READY_SECONDS))
        except httpx.TransportError as error:
            return _away(self._address, error)

    async def _ask(self, jpeg: bytes, deadline: float) -> httpx.Response:
        left = max(deadline - time.monotonic(), 0.001)
        timeout = httpx.Timeout(left, connect=min(left, _CONNECT_SECONDS))
        headers = {"Content-Type": "image/jpeg"}
        return await self._http.post("/layout", content=jpeg, headers=headers, timeout=timeout)


def readiness(settings: Settings) -> Readiness:
    """Whether the server would answer now, for callers without an event loop."""
    try:
        return _readiness(get(settings, "/health"))
    except httpx.TransportError as error:
        return _away(layout_address(settings), error)


def get(settings: Settings, path: str) -> httpx.Response:
    """One GET to the layout server. Raises httpx.TransportError."""
    address = layout_address(settings)
    transport = httpx.HTTPTransport(uds=str(address.socket) if address.socket else None)
    with httpx.Client(transport=transport, trust_env=False, timeout=_READY_SECONDS) as http:
        return http.get(address.url + path)


def _layout(response: httpx.Response) -> PageLayout:
    if response.is_client_error:
        raise PageUnrenderable(f"The layout server refuses the page's picture: {response.text}")
    try:
        response.raise_for_status()
        return _Answer.model_validate_json(response.content).layout()
    except (httpx.HTTPStatusError, ValidationError) as error:
        raise LayoutUnavailable(f"The layout server failed on the page: {response.text}") from error


def _readiness(response: httpx.Response) -> Readiness:
    try:
        return Readiness.model_validate_json(response.content)
    except ValidationError:
        return Readiness(ok=False, message=f"It answers {response.status_code}: {response.text}")


def _away(address: Address, error: httpx.TransportError) -> Readiness:
    return Readiness(ok=False, message=f"No layout server at {address}: {_in_words(error)}")


def _in_words(error: httpx.TransportError) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
