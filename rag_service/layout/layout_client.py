"""The client of the layout server.

It loads no model: a fork holds only the bytes of the pictures that it sends.
"""

from __future__ import annotations

import asyncio
import time

import httpx
from pydantic import BaseModel, ValidationError

from rag_service.config.options import Settings
from rag_service.errors import LayoutUnavailable, PageUnrenderable
from rag_service.layout.address import Address, layout_address
from rag_service.layout.page_layout import Bbox, LayoutBox, PageLayout
from rag_service.runtime.http_client import HttpClient, describe_error, trusted_certificates
from rag_service.runtime.process_resources import require_resources

# A server that died is restarted after about a second.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_CONNECT_SECONDS = 5.0
_READY_SECONDS = 5.0
_BUSY = 429
_NOT_READY = 503


class Readiness(BaseModel):
    """`ok`: the model is loaded. `message`: the reason if it is not."""

    ok: bool
    model: str | None = None
    message: str = ""


class _FoundBox(BaseModel):
    label: str
    score: float
    bbox: Bbox


class _Answer(BaseModel):
    model: str
    boxes: list[_FoundBox]

    def layout(self) -> PageLayout:
        boxes = tuple(LayoutBox(box.label, box.score, box.bbox) for box in self.boxes)
        return PageLayout(boxes, self.model)


class LayoutClient(HttpClient):
    """Requests to the layout server."""

    def __init__(self, settings: Settings) -> None:
        """Raise ConfigurationError if another user owns the folder of the socket."""
        self._address = layout_address(settings)
        self._outage_limit = settings.layout.outage_limit
        socket = self._address.socket
        http = httpx.AsyncClient(
            base_url=self._address.url,
            transport=httpx.AsyncHTTPTransport(
                uds=str(socket) if socket else None,
                limits=httpx.Limits(max_connections=None),
                verify=trusted_certificates(),
            ),
            trust_env=False,
            verify=trusted_certificates(),
        )
        super().__init__(http)

    async def find(self, jpeg: bytes) -> PageLayout:
        """Return the layout of the page in the picture.

        If the server dies during a request, the request is sent again; the server stores nothing,
        so this is safe. Raises LayoutUnavailable if the server did not answer for
        layout.outage_limit seconds or failed on this picture, and PageUnrenderable if it refuses
        the picture.
        """
        pause = _FIRST_PAUSE
        deadline = time.monotonic() + self._outage_limit
        while True:
            try:
                response = await self._ask(jpeg, deadline)
                if response.status_code == _BUSY:
                    deadline = time.monotonic() + self._outage_limit
                elif response.status_code != _NOT_READY:
                    return _layout(response)
                reason = response.text
            except httpx.TransportError as error:
                require_resources(error)
                reason = describe_error(error)
            if time.monotonic() + pause > deadline:
                raise LayoutUnavailable(
                    f"The layout server at {self._address} did not answer for "
                    f"{self._outage_limit:g} s: {reason}"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def ready(self) -> Readiness:
        """Return whether the server would answer now."""
        try:
            return _readiness(await self._http.get("/health", timeout=_READY_SECONDS))
        except httpx.TransportError as error:
            return _unreachable(self._address, error)

    async def _ask(self, jpeg: bytes, deadline: float) -> httpx.Response:
        left = max(deadline - time.monotonic(), 0.001)
        timeout = httpx.Timeout(left, connect=min(left, _CONNECT_SECONDS))
        headers = {"Content-Type": "image/jpeg"}
        return await self._http.post("/layout", content=jpeg, headers=headers, timeout=timeout)


def readiness(settings: Settings) -> Readiness:
    """Return whether the server would answer now, for callers without an event loop."""
    try:
        return _readiness(get(settings, "/health"))
    except httpx.TransportError as error:
        return _unreachable(layout_address(settings), error)


def get(settings: Settings, path: str) -> httpx.Response:
    """Send one GET to the layout server. Raises httpx.TransportError."""
    address = layout_address(settings)
    transport = httpx.HTTPTransport(uds=str(address.socket) if address.socket else None)
    with httpx.Client(transport=transport, trust_env=False, timeout=_READY_SECONDS) as http:
        return http.get(address.url + path)


def _layout(response: httpx.Response) -> PageLayout:
    if response.is_client_error:
        raise PageUnrenderable(
            f"The layout server refuses the picture of the page: {response.text}"
        )
    try:
        response.raise_for_status()
        return _Answer.model_validate_json(response.content).layout()
    except (httpx.HTTPStatusError, ValidationError) as error:
        raise LayoutUnavailable(f"The layout server failed on the page: {response.text}") from error


def _readiness(response: httpx.Response) -> Readiness:
    try:
        return Readiness.model_validate_json(response.content)
    except ValidationError:
        return Readiness(
            ok=False, message=f"It answered HTTP {response.status_code}: {response.text}"
        )


def _unreachable(address: Address, error: httpx.TransportError) -> Readiness:
    return Readiness(ok=False, message=f"No layout server at {address}: {describe_error(error)}")
