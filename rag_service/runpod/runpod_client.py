"""The one client of RunPod's serverless API: run, status, cancel, health. Used by durable jobs.

What RunPod answers is judged here by name; what to do about it is the caller's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx
from pydantic import BaseModel, FiniteFloat, ValidationError

from rag_service.config.options import RunPodOptions
from rag_service.errors import ConfigurationError, RagServiceError
from rag_service.runtime.certificates import trusted
from rag_service.runtime.retry import parse_retry_after

_REFUSED_KEY = frozenset({401, 403})
_REFUSED_BODY = frozenset({400, 413, 422})


class JobStatus(StrEnum):
    """A job's status in RunPod's words; a word that we do not know counts as pending."""

    IN_QUEUE = "IN_QUEUE"
    IN_PROGRESS = "IN_PROGRESS"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMED_OUT = "TIMED_OUT"

    @property
    def final(self) -> bool:
        return self in _FINAL


_FINAL = frozenset(
    {JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.TIMED_OUT}
)


class NotAccepted(RagServiceError):
    """The job was certainly not accepted: it may be posted again."""

    def __init__(self, message: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unreachable(NotAccepted):
    """Nothing listens there: worth a look at the endpoint before anything else."""


class LostAnswer(RagServiceError):
    """The post went out and brought no job id back: the job may exist."""


class EndpointRefused(RagServiceError):
    """RunPod refuses the key or does not know the endpoint."""


class BodyRefused(RagServiceError):
    """RunPod refuses this body; posting the same again changes nothing."""


class JobNotFound(RagServiceError):
    """RunPod does not know the job: not yet visible, or gone."""


class PollFailed(RagServiceError):
    """This poll brought nothing; the next may."""

    def __init__(self, message: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class JobReport:
    """One answer of /status; times in milliseconds as RunPod counts them."""

    status: JobStatus | None
    word: str
    output: Any
    error: str | None
    delay_ms: int | None
    execution_ms: int | None

    @property
    def pending(self) -> bool:
        return self.status is None or not self.status.final


@dataclass(frozen=True, slots=True)
class EndpointHealth:
    """Jobs and workers of the endpoint, by RunPod's names."""

    jobs: dict[str, int]
    workers: dict[str, int]

    @property
    def has_workers(self) -> bool:
        """Whether any worker runs or is on its way."""
        alive = ("idle", "running", "initializing", "ready")
        return any(self.workers.get(name, 0) > 0 for name in alive)


class _Report(BaseModel):
    status: str
    output: Any = None
    error: Any = None
    delayTime: FiniteFloat | None = None
    executionTime: FiniteFloat | None = None


class RunPodClient:
    """Requests to one endpoint, closed with the context."""

    def __init__(self, settings: RunPodOptions, *, base_url: str, endpoint_id: str) -> None:
        """Base and endpoint are those stored with the job. Raises ConfigurationError."""
        if settings.api_key is None:
            raise ConfigurationError("runpod.api_key is not set (RUNPOD_API_KEY).")
        self.url = f"{base_url.rstrip('/')}/{endpoint_id}"
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {settings.api_key.get_secret_value()}"},
            timeout=httpx.Timeout(settings.request_timeout, connect=settings.connect_timeout),
            verify=trusted(),
        )

    async def __aenter__(self) -> RunPodClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def run(self, body: bytes) -> str:
        """Post a job; its id. `body` is the whole JSON body.

        Raises NotAccepted, Unreachable, LostAnswer, EndpointRefused, BodyRefused.
        """
        try:
            response = await self._http.post(
                f"{self.url}/run", content=body, headers={"Content-Type": "application/json"}
            )
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unreachable(f"{self.url} cannot be reached: {_named(error)}") from error
        except httpx.PoolTimeout as error:
            raise NotAccepted(f"{self.url}: {_named(error)}") from error
        except httpx.RequestError as error:
            raise LostAnswer(f"The post's answer was lost: {_named(error)}") from error
        return self._posted(response)

    def _posted(self, response: httpx.Response) -> str:
        status, message = response.status_code, _described(response)
        if status == httpx.codes.TOO_MANY_REQUESTS:
            raise NotAccepted(message, _retry_after(response))
        self._require_ours(response, endpoint_itself=True)
        if status in _REFUSED_BODY:
            raise BodyRefused(message)
        remote_id = _job_id(response)
        if not isinstance(remote_id, str) or not remote_id:
            raise LostAnswer(f"The post brought no job id: {message}")
        return remote_id

    async def status(self, remote_id: str) -> JobReport:
        """Where a job is. Raises JobNotFound, PollFailed, EndpointRefused."""
        response = await self._ask("GET", f"/status/{_segment(remote_id)}")
        if response.status_code == httpx.codes.NOT_FOUND:
            raise JobNotFound(_described(response))
        try:
            report = _Report.model_validate(_object(response))
        except ValidationError as error:
            raise PollFailed(f"Not a job's status: {_described(response)}") from error
        return _report(report)

    async def cancel(self, remote_id: str) -> None:
        """Cancel a job; one that is gone is no error. Raises PollFailed, EndpointRefused."""
        response = await self._ask("POST", f"/cancel/{_segment(remote_id)}")
        if response.status_code not in {httpx.codes.OK, httpx.codes.NOT_FOUND}:
            raise PollFailed(_described(response))

    async def health(self) -> EndpointHealth:
        """Raises PollFailed, EndpointRefused."""
        response = await self._ask("GET", "/health")
        self._require_ours(response, endpoint_itself=True)
        if not response.is_success:
            raise PollFailed(_described(response))
        body = _object(response)
        return EndpointHealth(_counts(body.get("jobs")), _counts(body.get("workers")))

    async def _ask(self, method: str, path: str) -> httpx.Response:
        try:
            response = await self._http.request(method, self.url + path)
        except httpx.RequestError as error:
            raise PollFailed(f"{self.url}: {_named(error)}") from error
        self._require_ours(response)
        if response.status_code == httpx.codes.TOO_MANY_REQUESTS or response.is_server_error:
            raise PollFailed(_described(response), _retry_after(response))
        return response

    def _require_ours(self, response: httpx.Response, *, endpoint_itself: bool = False) -> None:
        """Raises EndpointRefused, naming the settings to look at.

        A 404 speaks of the endpoint where no job was asked for.
        """
        status = response.status_code
        said = f"{self.url} answered {_described(response)}"
        if status in _REFUSED_KEY:
            raise EndpointRefused(f"{said}; check RUNPOD_API_KEY")
        if endpoint_itself and status == httpx.codes.NOT_FOUND:
            raise EndpointRefused(f"{said}; check RUNPOD_ENDPOINT_ID and RUNPOD_API_BASE")


def _report(report: _Report) -> JobReport:
    known = report.status in set(JobStatus)
    return JobReport(
        status=JobStatus(report.status) if known else None,
        word=report.status,
        output=report.output,
        error=_error_text(report.error),
        delay_ms=int(report.delayTime) if report.delayTime is not None else None,
        execution_ms=int(report.executionTime) if report.executionTime is not None else None,
    )


def _error_text(error: Any) -> str | None:
    """A handler's exception comes as a JSON string with the message inside."""
    if error is None:
        return None
    if isinstance(error, str):
        try:
            error = json.loads(error)
        except ValueError:
            return str(error)
    if isinstance(error, dict):
        return str(error.get("error_message") or error)
    return str(error)


def _segment(remote_id: str) -> str:
    """An id in a path: it came from outside, and must not lead elsewhere."""
    return quote(remote_id, safe="")


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError as error:
        raise PollFailed(f"Not JSON: {_described(response)}") from error
    return body if isinstance(body, dict) else {}


def _job_id(response: httpx.Response) -> Any:
    """What a success names as the job's id; None for HTML, cut JSON or an error."""
    try:
        return _object(response).get("id") if response.is_success else None
    except PollFailed:
        return None


def _counts(found: Any) -> dict[str, int]:
    if not isinstance(found, dict):
        return {}
    return {str(name): n for name, n in found.items() if isinstance(n, int)}


def _retry_after(response: httpx.Response) -> float | None:
    return parse_retry_after(response.headers.get("Retry-After"), datetime.now(UTC))


def _named(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()


def _described(response: httpx.Response) -> str:
    text = " ".join(response.text.split())[:300] or "empty body"
    return f"HTTP {response.status_code}: {text}"
