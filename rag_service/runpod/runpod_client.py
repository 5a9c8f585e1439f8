"""The client of RunPod's serverless API: run, status, cancel, health.

Each kind of answer is a result or an error class; the caller decides what to do about it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import quote

import httpx
from pydantic import BaseModel, FiniteFloat, ValidationError

from rag_service.config.options import RunPodOptions
from rag_service.errors import ConfigurationError, RagServiceError
from rag_service.runtime.http_client import (
    HttpClient,
    describe_error,
    describe_response,
    retry_after,
    trusted_certificates,
)

_REFUSED_KEY = frozenset({401, 403})
_REFUSED_BODY = frozenset({400, 413, 422})


class JobStatus(StrEnum):
    """A job's status as RunPod names it. An unknown status counts as pending."""

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
    """No connection to RunPod: probe the endpoint before the next post."""


class LostAnswer(RagServiceError):
    """The post was sent but no job id came back: the job may exist."""


class EndpointRefused(RagServiceError):
    """RunPod refuses the key or does not know the endpoint."""


class BodyRefused(RagServiceError):
    """RunPod refuses this body; the same post would be refused again."""


class JobNotFound(RagServiceError):
    """RunPod does not know the job: it is not visible yet, or RunPod dropped it."""


class PollFailed(RagServiceError):
    """The poll brought no usable answer; the next may."""

    def __init__(self, message: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class JobReport:
    """One answer of /status. `word`: the status as text. Times are in milliseconds."""

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
    """Counts of the endpoint's jobs and workers, by RunPod's state names."""

    jobs: dict[str, int]
    workers: dict[str, int]

    @property
    def has_workers(self) -> bool:
        """Return whether any worker runs or is starting."""
        states = ("idle", "running", "initializing", "ready")
        return any(self.workers.get(state, 0) > 0 for state in states)


class _Report(BaseModel):
    status: str
    output: Any = None
    error: Any = None
    delayTime: FiniteFloat | None = None
    executionTime: FiniteFloat | None = None


class RunPodClient(HttpClient):
    """Requests to one endpoint."""

    def __init__(self, settings: RunPodOptions, *, base_url: str, endpoint_id: str) -> None:
        """`base_url`, `endpoint_id`: those stored with the job. Raises ConfigurationError."""
        if settings.api_key is None:
            raise ConfigurationError("runpod.api_key is not set (RUNPOD_API_KEY).")
        self.url = f"{base_url.rstrip('/')}/{endpoint_id}"
        http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {settings.api_key.get_secret_value()}"},
            timeout=httpx.Timeout(settings.request_timeout, connect=settings.connect_timeout),
            verify=trusted_certificates(),
        )
        super().__init__(http)

    async def run(self, body: bytes) -> str:
        """Post a job and return its id. `body` is the whole JSON body.

        Raises NotAccepted, Unreachable, LostAnswer, EndpointRefused, BodyRefused.
        """
        try:
            response = await self._http.post(
                f"{self.url}/run", content=body, headers={"Content-Type": "application/json"}
            )
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unreachable(f"{self.url} cannot be reached: {describe_error(error)}") from error
        except httpx.PoolTimeout as error:
            raise NotAccepted(f"{self.url}: {describe_error(error)}") from error
        except httpx.RequestError as error:
            raise LostAnswer(f"The answer of the post was lost: {describe_error(error)}") from error
        return self._posted_id(response)

    def _posted_id(self, response: httpx.Response) -> str:
        status, message = response.status_code, describe_response(response)
        if status == httpx.codes.TOO_MANY_REQUESTS:
            raise NotAccepted(message, retry_after(response))
        self._require_access(response, endpoint_itself=True)
        if status in _REFUSED_BODY:
            raise BodyRefused(message)
        remote_id = _job_id(response)
        if not isinstance(remote_id, str) or not remote_id:
            raise LostAnswer(f"The post brought no job id: {message}")
        return remote_id

    async def status(self, remote_id: str) -> JobReport:
        """Return the status of a job. Raises JobNotFound, PollFailed, EndpointRefused."""
        response = await self._ask("GET", f"/status/{_segment(remote_id)}")
        if response.status_code == httpx.codes.NOT_FOUND:
            raise JobNotFound(describe_response(response))
        try:
            report = _Report.model_validate(_object(response))
        except ValidationError as error:
            raise PollFailed(f"Not a job's status: {describe_response(response)}") from error
        return _report(report)

    async def cancel(self, remote_id: str) -> None:
        """Cancel a job; an unknown job is no error. Raises PollFailed, EndpointRefused."""
        response = await self._ask("POST", f"/cancel/{_segment(remote_id)}")
        if response.status_code not in {httpx.codes.OK, httpx.codes.NOT_FOUND}:
            raise PollFailed(describe_response(response))

    async def health(self) -> EndpointHealth:
        """Return the endpoint's counts. Raises PollFailed, EndpointRefused."""
        response = await self._ask("GET", "/health")
        self._require_access(response, endpoint_itself=True)
        if not response.is_success:
            raise PollFailed(describe_response(response))
        body = _object(response)
        return EndpointHealth(_counts(body.get("jobs")), _counts(body.get("workers")))

    async def _ask(self, method: str, path: str) -> httpx.Response:
        try:
            response = await self._http.request(method, self.url + path)
        except httpx.RequestError as error:
            raise PollFailed(f"{self.url}: {describe_error(error)}") from error
        self._require_access(response)
        if response.status_code == httpx.codes.TOO_MANY_REQUESTS or response.is_server_error:
            raise PollFailed(describe_response(response), retry_after(response))
        return response

    def _require_access(self, response: httpx.Response, *, endpoint_itself: bool = False) -> None:
        """Raise EndpointRefused, with the settings to check.

        `endpoint_itself`: the path names no job, so a 404 means that the endpoint does not exist.
        """
        status = response.status_code
        answer = f"{self.url} answered {describe_response(response)}"
        if status in _REFUSED_KEY:
            raise EndpointRefused(f"{answer}; check RUNPOD_API_KEY")
        if endpoint_itself and status == httpx.codes.NOT_FOUND:
            raise EndpointRefused(f"{answer}; check RUNPOD_ENDPOINT_ID and RUNPOD_API_BASE")


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
    """Return the error's message. A handler's exception is a JSON string that contains it."""
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
    """Return the id quoted for a path: it is foreign input and must not change the path."""
    return quote(remote_id, safe="")


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError as error:
        raise PollFailed(f"Not JSON: {describe_response(response)}") from error
    return body if isinstance(body, dict) else {}


def _job_id(response: httpx.Response) -> Any:
    """Return the job's id of a success, or None for an error, HTML or cut JSON."""
    try:
        return _object(response).get("id") if response.is_success else None
    except PollFailed:
        return None


def _counts(found: Any) -> dict[str, int]:
    if not isinstance(found, dict):
        return {}
    return {str(name): n for name, n in found.items() if isinstance(n, int)}
