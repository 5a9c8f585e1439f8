"""The one client of OpenAI-compatible OCR servers: one page a request. Used by parsers, probes.

Works against SGLang, vLLM, Ollama and our CPU server alike.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

import httpx
from pydantic import BaseModel

from rag_service.config.options import OcrOptions
from rag_service.errors import ConfigurationError, OcrMisconfigured, RagServiceError
from rag_service.ocr.server_gauges import ServerGauges, ServerLimits, read_gauges, read_limits
from rag_service.runtime.certificates import trusted
from rag_service.runtime.retry import RETRYABLE_STATUS, TryAgain, parse_retry_after

# The model card's penalty. Greedy reading is its choice; a reading that looped is warmed up, which
# greedy top_p and top_k would undo.
_PENALTY = {"repetition_penalty": 1.1}
_GREEDY = {"temperature": 0.0, "top_p": 1e-05, "top_k": 1}
_WARM = {"temperature": 0.3, "top_p": 0.9}
_MISCONFIGURED_STATUS = frozenset({401, 403, 404})
_REJECTED_STATUS = frozenset({400, 413, 422})
# Any other reason (abort, content_filter) means that the text is not what the page says.
_FINISHED = frozenset({"stop", "length"})
# A server that prefers a smaller picture says so in one of these ways.
_SIZE_WORDS = re.compile(
    r"encoder cache|too large|too long|too many tokens|exceed|maximum context|context length",
    re.IGNORECASE,
)
_PROBE_SECONDS = 25.0


class ConnectionRefused(TryAgain):
    """Nothing listens there: worth a probe before anything else."""


class AnswerTimedOut(TryAgain):
    """The request was open for ocr.read_timeout without an answer."""


class Rejected(RagServiceError):
    """The server refuses this page; asking again for the same changes nothing."""


class RejectedForSize(Rejected):
    """The server refuses this picture for its size; a smaller one may do."""


class ServerFailed(RagServiceError):
    """The server failed on this page: an HTTP 500, or a 200 without a usable answer."""


@dataclass(frozen=True, slots=True)
class PageAnswer:
    """One picture's text as the server gave it; `seconds` from request to answer."""

    text: str
    finish_reason: str
    prompt_tokens: int | None
    completion_tokens: int | None
    model: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What /v1/models says of the model we ask for."""

    owner: str | None
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a server would answer now, and the reason where it would not.

    `other_model`: it answers, and says that it serves other models than ours. `seen`: the message
    without the settings to check, where it names any.
    """

    ok: bool
    misconfigured: bool = False
    message: str = ""
    other_model: bool = False
    seen: str = ""


class _Message(BaseModel):
    content: str | None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Completion(BaseModel):
    choices: Sequence[_Choice]
    usage: _Usage | None = None
    model: str | None = None


class OcrClient:
    """Requests to one server, closed with the context; cancelling a call closes its request."""

    def __init__(self, settings: OcrOptions, *, connections: int) -> None:
        """Raises ConfigurationError where no server is set."""
        self.url = server_url(settings)
        self._model = settings.model
        key = settings.api_key.get_secret_value() if settings.api_key else None
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(
                connect=settings.connect_timeout,
                write=settings.write_timeout,
                read=settings.read_timeout,
                pool=settings.pool_timeout,
            ),
            limits=httpx.Limits(max_connections=connections + 2),
            verify=trusted(),
        )

    async def __aenter__(self) -> OcrClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def read(
        self, jpeg: bytes, *, prompt: str, max_tokens: int, warm: bool = False
    ) -> PageAnswer:
        """Have one picture read; `warm` lets the answer differ from the greedy one.

        Raises TryAgain (worth another request), ConnectionRefused, OcrMisconfigured, Rejected,
        ServerFailed.
        """
        started = time.monotonic()
        response = await self._post(self._body(jpeg, prompt, max_tokens, warm=warm))
        self._check(response)
        try:
            # Not pydantic's own reader: it refuses the halves of surrogate pairs that models emit.
            completion = _Completion.model_validate(json.loads(response.content))
        except (ValueError, RecursionError) as error:
            raise ServerFailed(f"HTTP 200 without an answer: {_excerpt(response)}") from error
        return self._answer(completion, time.monotonic() - started)

    def _body(self, jpeg: bytes, prompt: str, max_tokens: int, *, warm: bool) -> dict[str, Any]:
        picture = "data:image/jpeg;base64," + base64.b64encode(jpeg).decode("ascii")
        content = [
            {"type": "image_url", "image_url": {"url": picture}},
            {"type": "text", "text": prompt},
        ]
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            **(_WARM if warm else _GREEDY),
            **_PENALTY,
        }

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        try:
            return await self._http.post("/v1/chat/completions", json=body)
        except httpx.ConnectError as error:
            raise ConnectionRefused(f"{self.url} cannot be reached: {error}") from error
        except httpx.ReadTimeout as error:
            raise AnswerTimedOut(f"{self.url}: ReadTimeout, no answer in time.") from error
        except httpx.RequestError as error:
            raise TryAgain(f"{self.url}: {type(error).__name__} {error}".strip()) from error

    def _check(self, response: httpx.Response) -> None:
        status = response.status_code
        if status == httpx.codes.OK:
            return
        message = f"{self.url} answered HTTP {status}: {_excerpt(response)}"
        if status in RETRYABLE_STATUS:
            asked = parse_retry_after(response.headers.get("Retry-After"), datetime.now(UTC))
            raise TryAgain(message, asked)
        if status in _MISCONFIGURED_STATUS:
            raise OcrMisconfigured(message)
        if status in _REJECTED_STATUS:
            too_big = status == httpx.codes.REQUEST_ENTITY_TOO_LARGE
            for_size = too_big or _SIZE_WORDS.search(response.text)
            raise RejectedForSize(message) if for_size else Rejected(message)
        raise ServerFailed(message)

    def _answer(self, completion: _Completion, seconds: float) -> PageAnswer:
        if not completion.choices or completion.choices[0].message.content is None:
            raise ServerFailed("HTTP 200 without any text field in the answer.")
        choice = completion.choices[0]
        finish_reason = choice.finish_reason or "stop"
        if finish_reason not in _FINISHED:
            raise ServerFailed(f"The server ended its answer by {finish_reason!r}.")
        usage = completion.usage or _Usage()
        return PageAnswer(
            text=choice.message.content or "",
            finish_reason=finish_reason,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            model=completion.model or self._model,
            seconds=round(seconds, 3),
        )

    async def gauges(self) -> ServerGauges | None:
        """What the server says of its batch now; None where it shows nothing."""
        return await read_gauges(self._http)

    async def limits(self) -> ServerLimits:
        """What the server says of itself once; empty where it says nothing."""
        return await read_limits(self._http)

    async def probe(self) -> Probe:
        """Ask whether the server would answer a page: /health, then our model in /v1/models.

        A server without /health (404) is judged by /v1/models alone.
        """
        try:
            health = await self._http.get("/health", timeout=_PROBE_SECONDS)
            if health.status_code != httpx.codes.NOT_FOUND and not _is_healthy(health):
                return self._bad("/health", health)
            models = await self._http.get("/v1/models", timeout=_PROBE_SECONDS)
        except httpx.RequestError as error:
            return Probe(False, message=f"{self.url}: {type(error).__name__} {error}".strip())
        return self._judge(models)

    def _bad(self, path: str, response: httpx.Response) -> Probe:
        status = response.status_code
        seen = f"{self.url}{path}: HTTP {status}"
        # Pages are posted, which no redirect carries along.
        if response.has_redirect_location:
            seen += f" to {response.headers['location']}"
        elif status not in _MISCONFIGURED_STATUS:
            loading = ", the model is still loading" if status == httpx.codes.OK else ""
            return Probe(False, message=seen + loading)
        message = f"{seen}; check GLMOCR_BASE_URL and GLMOCR_API_KEY"
        return Probe(False, misconfigured=True, message=message, seen=seen)

    def _judge(self, models: httpx.Response) -> Probe:
        if models.status_code != httpx.codes.OK:
            return self._bad("/v1/models", models)
        names = [str(model.get("id")) for model in _models(models)]
        if self._model not in names:
            message = (
                f"{self.url} does not serve the model {self._model!r} (GLMOCR_MODEL); "
                f"it serves: {', '.join(names) or 'none'}"
            )
            return Probe(False, misconfigured=True, message=message, other_model=bool(names))
        return Probe(True)

    async def model_info(self) -> ModelInfo:
        """What the server says of our model; empty where it says nothing."""
        try:
            response = await self._http.get("/v1/models", timeout=_PROBE_SECONDS)
        except httpx.RequestError:
            return ModelInfo(None, None)
        for model in _models(response):
            if model.get("id") == self._model:
                length = model.get("max_model_len")
                owner = model.get("owned_by")
                return ModelInfo(
                    str(owner) if owner else None, length if isinstance(length, int) else None
                )
        return ModelInfo(None, None)


def server_url(settings: OcrOptions) -> str:
    """The OCR server's URL; ConfigurationError where none is set."""
    if not settings.base_url:
        raise ConfigurationError(
            "ocr.base_url is not set: set GLMOCR_BASE_URL, or use `rag-service up` or "
            "`rag-service run`, which start a CPU server of their own."
        )
    return settings.base_url


def _is_healthy(response: httpx.Response) -> bool:
    """A bare 200, or a 200 whose JSON does not say that the model is still loading."""
    if response.status_code != httpx.codes.OK:
        return False
    try:
        body = response.json()
    except ValueError:
        return True
    return not (isinstance(body, dict) and body.get("model_loaded") is False)


def _models(response: httpx.Response) -> list[dict[str, Any]]:
    try:
        data = response.json()["data"]
    except (ValueError, KeyError, TypeError):
        return []
    return [model for model in data if isinstance(model, dict)] if isinstance(data, list) else []


def _excerpt(response: httpx.Response) -> str:
    """The beginning of a body, in one line."""
    return " ".join(response.text.split())[:300] or "empty body"
