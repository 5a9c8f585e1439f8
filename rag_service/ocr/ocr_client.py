"""The client of OpenAI-compatible OCR servers: one picture per request.

Works with SGLang, vLLM, Ollama and the CPU OCR server of this package.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel

from rag_service.config.options import OcrOptions
from rag_service.errors import ConfigurationError, OcrMisconfigured, RagServiceError
from rag_service.ocr.server_gauges import ServerGauges, ServerLimits, read_gauges, read_limits
from rag_service.runtime.http_client import (
    HttpClient,
    describe_error,
    describe_response,
    excerpt,
    retry_after,
    trusted_certificates,
)
from rag_service.runtime.process_resources import require_resources
from rag_service.runtime.retry import RETRYABLE_STATUS, TryAgain

# The penalty and the greedy values are the model card's. A reading that repeated itself is sampled
# at a higher temperature, on which the greedy top_p and top_k would have the effect of greedy.
_PENALTY = {"repetition_penalty": 1.1}
_GREEDY = {"temperature": 0.0, "top_p": 1e-05, "top_k": 1}
_WARM = {"temperature": 0.3, "top_p": 0.9}
_MISCONFIGURED_STATUS = frozenset({401, 403, 404})
_REJECTED_STATUS = frozenset({400, 413, 422})
# With any other reason (abort, content_filter) the text is not that of the page.
_FINISHED = frozenset({"stop", "length"})
# Words by which servers refuse a picture because of its size.
_SIZE_WORDS = re.compile(
    r"encoder cache|too large|too long|too many tokens|exceed|maximum context|context length",
    re.IGNORECASE,
)
_PROBE_SECONDS = 25.0


class ConnectionRefused(TryAgain):
    """No connection to the server: probe it before the next request."""


class AnswerTimedOut(TryAgain):
    """The request was open for ocr.read_timeout without an answer."""


class Rejected(RagServiceError):
    """The server refuses this page; the same request would be refused again."""


class RejectedForSize(Rejected):
    """The server refuses this picture because of its size; a smaller one may be accepted."""


class ServerFailed(RagServiceError):
    """The server failed on this page: an HTTP 500, or a 200 without a usable answer."""


@dataclass(frozen=True, slots=True)
class PageAnswer:
    """One picture's text as the server returned it. `seconds`: from request to answer."""

    text: str
    finish_reason: str
    prompt_tokens: int | None
    completion_tokens: int | None
    model: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What /v1/models says about the configured model."""

    owner: str | None
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a server would answer a page now; `message`: the reason if it would not.

    `other_model`: it answers but serves other models than the configured one. `answer`: the part
    of the message without the settings to check; empty if the message names no settings.
    """

    ok: bool
    misconfigured: bool = False
    message: str = ""
    other_model: bool = False
    answer: str = ""


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


class OcrClient(HttpClient):
    """Requests to one server. Cancelling a call closes its request."""

    def __init__(self, settings: OcrOptions, *, connections: int) -> None:
        """Raise ConfigurationError if no server is set."""
        self.url = server_url(settings)
        self._model = settings.model
        key = settings.api_key.get_secret_value() if settings.api_key else None
        http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(
                connect=settings.connect_timeout,
                write=settings.write_timeout,
                read=settings.read_timeout,
                pool=settings.pool_timeout,
            ),
            limits=httpx.Limits(max_connections=connections + 2),
            verify=trusted_certificates(),
        )
        super().__init__(http)

    async def read(
        self, jpeg: bytes, *, prompt: str, max_tokens: int, warm: bool = False
    ) -> PageAnswer:
        """Return the text of one picture. `warm`: sample it, so that it may differ from the
        greedy answer.

        Raises TryAgain (worth another request), ConnectionRefused, OcrMisconfigured, Rejected,
        ServerFailed, ProcessInTrouble.
        """
        started = time.monotonic()
        response = await self._post(self._body(jpeg, prompt, max_tokens, warm=warm))
        self._check(response)
        try:
            # Unlike json, pydantic's parser refuses the lone surrogates that models emit.
            completion = _Completion.model_validate(json.loads(response.content))
        except (ValueError, RecursionError) as error:
            raise ServerFailed(f"HTTP 200 without an answer: {excerpt(response)}") from error
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
            require_resources(error)
            message = f"{self.url} cannot be reached: {describe_error(error)}"
            raise ConnectionRefused(message) from error
        except httpx.ReadTimeout as error:
            raise AnswerTimedOut(f"{self.url}: {describe_error(error)}") from error
        except httpx.RequestError as error:
            require_resources(error)
            raise TryAgain(f"{self.url}: {describe_error(error)}") from error

    def _check(self, response: httpx.Response) -> None:
        status = response.status_code
        if status == httpx.codes.OK:
            return
        message = f"{self.url} answered {describe_response(response)}"
        if status in RETRYABLE_STATUS:
            raise TryAgain(message, retry_after(response))
        if status in _MISCONFIGURED_STATUS:
            advice = "check GLMOCR_BASE_URL and GLMOCR_MODEL"
            if status != httpx.codes.NOT_FOUND:
                advice = self._key_advice
            raise OcrMisconfigured(f"{message}; {advice}")
        if status in _REJECTED_STATUS:
            too_large = status == httpx.codes.REQUEST_ENTITY_TOO_LARGE
            for_size = too_large or _SIZE_WORDS.search(response.text)
            raise RejectedForSize(message) if for_size else Rejected(message)
        raise ServerFailed(message)

    def _answer(self, completion: _Completion, seconds: float) -> PageAnswer:
        if not completion.choices or completion.choices[0].message.content is None:
            raise ServerFailed("HTTP 200 without any text field in the answer.")
        choice = completion.choices[0]
        finish_reason = choice.finish_reason or "stop"
        if finish_reason not in _FINISHED:
            raise ServerFailed(f"The server ended its answer with the reason {finish_reason!r}.")
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
        """Return the gauges of the server's batch, or None if it has none."""
        return await read_gauges(self._http)

    async def limits(self) -> ServerLimits:
        """Return the server's slots and version; empty if it does not report them."""
        return await read_limits(self._http)

    async def probe(self) -> Probe:
        """Ask whether the server would answer a page: /health, then the model in /v1/models.

        For a server without /health (404) only /v1/models is asked.
        """
        try:
            health = await self._http.get("/health", timeout=_PROBE_SECONDS)
        except httpx.RequestError as error:
            return Probe(False, message=f"{self.url}: {describe_error(error)}")
        if health.status_code != httpx.codes.NOT_FOUND and not _is_healthy(health):
            return self._failed_probe("/health", health)
        return await self.probe_models()

    async def probe_models(self) -> Probe:
        """Ask only whether the server lists the model: a quick check of address, key and model."""
        try:
            models = await self._http.get("/v1/models", timeout=_PROBE_SECONDS)
        except httpx.RequestError as error:
            return Probe(False, message=f"{self.url}: {describe_error(error)}")
        if models.status_code != httpx.codes.OK:
            return self._failed_probe("/v1/models", models)
        if not _is_listing(models):
            answer = f"{self.url}/v1/models is no list of models but {excerpt(models)}"
            return self._wrong_address(answer)
        names = [str(model.get("id")) for model in _models(models)]
        if self._model not in names:
            message = (
                f"{self.url} does not serve the model {self._model!r} (GLMOCR_MODEL); "
                f"it serves: {', '.join(names) or 'none'}"
            )
            return Probe(False, misconfigured=True, message=message, other_model=bool(names))
        return Probe(True)

    def _failed_probe(self, path: str, response: httpx.Response) -> Probe:
        status = response.status_code
        answer = f"{self.url}{path}: HTTP {status}"
        # A redirect is of no use: it turns the POST of a page into a GET.
        if response.has_redirect_location:
            return self._wrong_address(f"{answer} to {response.headers['location']}")
        if status == httpx.codes.NOT_FOUND:
            return self._wrong_address(answer)
        if status in _MISCONFIGURED_STATUS:
            message = f"{answer}; {self._key_advice}"
            return Probe(False, misconfigured=True, message=message, answer=answer)
        loading = ", the model is still loading" if status == httpx.codes.OK else ""
        return Probe(False, message=answer + loading)

    @property
    def _key_advice(self) -> str:
        is_set = "Authorization" in self._http.headers
        return f"check GLMOCR_API_KEY{'' if is_set else ', which is not set'}"

    def _wrong_address(self, answer: str) -> Probe:
        """Return what to say about an address that is not that of an OCR server."""
        message = f"{answer}; check GLMOCR_BASE_URL"
        if path := urlsplit(self.url).path:
            message += f": it has the path {path}, to which /v1 is added"
        return Probe(False, misconfigured=True, message=message, answer=answer)

    async def model_info(self) -> ModelInfo:
        """Return what the server says about the configured model; empty if it says nothing."""
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
    """Return the OCR server's URL. Raises ConfigurationError if none is set."""
    if not settings.base_url:
        raise ConfigurationError(
            "ocr.base_url is not set: set GLMOCR_BASE_URL, or use `rag-service up` or "
            "`rag-service run`, which start a CPU OCR server."
        )
    return settings.base_url


def _is_healthy(response: httpx.Response) -> bool:
    """Return whether it is a 200 whose body, if it is JSON, does not say `model_loaded: false`."""
    if response.status_code != httpx.codes.OK:
        return False
    try:
        body = response.json()
    except ValueError:
        return True
    return not (isinstance(body, dict) and body.get("model_loaded") is False)


def _is_listing(response: httpx.Response) -> bool:
    try:
        body = response.json()
    except ValueError:
        return False
    return isinstance(body, dict) and isinstance(body.get("data"), list)


def _models(response: httpx.Response) -> list[dict[str, Any]]:
    try:
        data = response.json()["data"]
    except (ValueError, KeyError, TypeError):
        return []
    return [model for model in data if isinstance(model, dict)] if isinstance(data, list) else []
