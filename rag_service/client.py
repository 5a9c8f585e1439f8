"""The HTTP client of this service's API: typed answers, and errors by their code."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from rag_service.config.hosts import is_loopback
from rag_service.config.options import Settings
from rag_service.errors import (
    OUTAGES,
    AnswerTimeout,
    BacklogFull,
    ConfigurationError,
    InvalidOptions,
    NotFound,
    PageError,
    RagServiceError,
    ServiceUnreachable,
    Unauthorized,
)
from rag_service.knowledgebase.views import (
    DocumentView,
    JobView,
    PageView,
    Redo,
    ReprocessJobView,
    ServerView,
    SummaryView,
    WholePageView,
)
from rag_service.runtime.http_client import describe_error
from rag_service.states import RunState

_CONNECT_SECONDS = 5.0
# The answer to an upload comes after the file was hashed and stored, on S3 too.
_ANSWER_SECONDS = 300.0
_DOCUMENTS_PER_REQUEST = 100
_PAGES_PER_REQUEST = 100
# As many as the service handles at once, without a job.
_IDS_PER_REQUEST = 100
_JOBS_LISTED = 100
# Less than a whole id, which has 32 digits.
_ID_PREFIX = re.compile(r"[0-9a-f]{4,31}")
_CANDIDATES_SHOWN = 3
# An upload is idempotent by its sha256, so it is safe to send it again.
_RETRY_WAITS = (1.0, 3.0, 9.0)
_BACKLOG_SECONDS = 10.0
# The service's default.
_PRIORITY = "bulk"

View = TypeVar("View", bound=BaseModel)


class Sent(BaseModel):
    """The document that an upload added or found."""

    id: str
    status: RunState
    duplicate: bool


class _Listing(BaseModel):
    documents: list[DocumentView]
    next_cursor: str | None


class _CancelAnswer(BaseModel):
    cancelled: bool


class _RedoList(BaseModel):
    documents: list[Redo]
    selected: int


class _ReprocessJobs(BaseModel):
    jobs: list[ReprocessJobView]


@dataclass(frozen=True, slots=True)
class Redone:
    """What became of a selection: documents that were handled at once, and jobs for the others.

    `selected`: the number of documents of which a dry run shows the first.
    """

    documents: list[Redo] = field(default_factory=list)
    jobs: list[ReprocessJobView] = field(default_factory=list)
    selected: int = 0


class _Jobs(BaseModel):
    jobs: list[JobView]


class FaultView(BaseModel):
    """A fault that health reports: its name and a sentence."""

    name: str
    message: str


class _Health(BaseModel):
    failed: list[FaultView] = []
    degraded: list[FaultView] = []


class _Servers(BaseModel):
    servers: list[ServerView]


class _Pages(BaseModel):
    pages: list[PageView]
    next_after: int | None


class Client:
    """A client of the service at api.url; safe to use from several threads.

    Where a method takes a document's id, it also takes its first digits, at least 4, if no other
    document has the same. Every method raises the error class of the code that the service answers
    with, and ServiceUnreachable.
    """

    def __init__(self, settings: Settings) -> None:
        """Raise ConfigurationError if api.url is not an address."""
        self._closed = threading.Event()
        self._url = settings.api.url.rstrip("/")
        _require_address(self._url)
        key = settings.api.key
        self._http = httpx.Client(
            base_url=self._url,
            headers={"Authorization": f"Bearer {key.get_secret_value()}"} if key else {},
            timeout=httpx.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS),
            # Proxies of the environment are not used for this machine.
            trust_env=not is_loopback(urlsplit(self._url).hostname or ""),
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the client; requests of other threads are aborted."""
        self._closed.set()
        self._http.close()

    def require_answer(self) -> None:
        """Raise ServiceUnreachable, Unauthorized or Forbidden before a long piece of work."""
        self._ask("GET", "/documents", params={"limit": "1"})

    def send(
        self,
        path: Path,
        fields: dict[str, str],
        *,
        on_backlog: Callable[[float], None] = lambda _: None,
    ) -> Sent:
        """Upload a file, streamed from the disk.

        While the service answers that its backlog is full, wait and try again; `on_backlog` gets
        the seconds of each wait. Raises OSError if the file cannot be read.
        """
        waits = iter(_RETRY_WAITS)
        while True:
            try:
                return self._send_once(path, fields)
            except _Backlog as full:
                on_backlog(full.seconds)
                wait: float | None = full.seconds
            except OUTAGES:
                wait = next(waits, None)
                if wait is None:
                    raise
            if self._closed.wait(wait):
                raise ServiceUnreachable("The upload was aborted.")

    def _send_once(self, path: Path, fields: dict[str, str]) -> Sent:
        with path.open("rb") as file:
            answer = self._ask(
                "POST",
                "/documents",
                # Before the file, so that the service may refuse it by its priority.
                data={"priority": _PRIORITY} | fields,
                files={"file": (_upload_name(path), file)},
            )
        return _parse(Sent, answer)

    def document(self, document_id: str) -> DocumentView:
        return _parse(DocumentView, self._ask("GET", self._path(document_id)))

    def documents(self, filters: dict[str, str], limit: int) -> list[DocumentView]:
        """Return the newest documents that match the filters, at most `limit`."""
        found: list[DocumentView] = []
        cursor: dict[str, str] = {}
        while len(found) < limit:
            query = (
                filters | cursor | {"limit": str(min(_DOCUMENTS_PER_REQUEST, limit - len(found)))}
            )
            listing = _parse(_Listing, self._ask("GET", "/documents", params=query))
            found += listing.documents
            if listing.next_cursor is None:
                break
            cursor = {"cursor": listing.next_cursor}
        return found

    def pages(self, document_id: str) -> Iterator[PageView]:
        """Yield the pages of the document's current run in order; some are fetched at a time."""
        after = 0
        while True:
            answer = self._ask(
                "GET",
                f"{self._path(document_id)}/pages",
                params={"after": str(after), "limit": str(_PAGES_PER_REQUEST)},
            )
            batch = _parse(_Pages, answer)
            yield from batch.pages
            if batch.next_after is None:
                return
            after = batch.next_after

    def page(self, document_id: str, number: int) -> WholePageView:
        path = f"{self._path(document_id)}/pages/{number}"
        return _parse(WholePageView, self._ask("GET", path))

    def jobs(self, document_id: str) -> list[JobView]:
        """Return the jobs that were posted to RunPod for the document, oldest first."""
        return _parse(_Jobs, self._ask("GET", f"{self._path(document_id)}/jobs")).jobs

    def servers(self) -> list[ServerView]:
        """Return the OCR servers that maintenance sampled recently."""
        return _parse(_Servers, self._ask("GET", "/servers")).servers

    def summary(self) -> SummaryView:
        """Return what waits, the expected time for it, and the failed documents by cause."""
        return _parse(SummaryView, self._ask("GET", "/summary"))

    def faults(self) -> list[FaultView]:
        """Return what health reports: what has failed and what makes documents wait."""
        # With 503 it is the same answer.
        found = _parse(_Health, self._request("GET", "/health/ready"))
        return found.failed + found.degraded

    def cancel(self, document_id: str) -> bool:
        """Cancel the active run. Return False if there was none."""
        answer = self._ask("POST", f"{self._path(document_id)}/cancel")
        return _parse(_CancelAnswer, answer).cancelled

    def delete(self, document_id: str) -> None:
        self._ask("DELETE", self._path(document_id))

    def redo(self, document_id: str, changes: dict[str, Any]) -> Redo:
        """Reprocess one document; `changes` may contain a password."""
        path = f"{self._path(document_id)}/reprocess"
        return _parse(Redo, self._ask("POST", path, json=changes))

    def redo_many(self, selectors: dict[str, Any]) -> Redone:
        """Reprocess the selected documents; `ids` may be of any length."""
        ids = [self._whole_id(one) for one in selectors.get("ids", [])]
        batches = [ids[i : i + _IDS_PER_REQUEST] for i in range(0, len(ids), _IDS_PER_REQUEST)] or [
            []
        ]
        redone = Redone()
        for batch in batches:
            answer = self._ask("POST", "/reprocess", json=selectors | {"ids": batch})
            if answer.status_code == HTTPStatus.ACCEPTED:
                job = _parse(ReprocessJobView, answer)
                redone = replace(redone, jobs=[*redone.jobs, job])
                continue
            found = _parse(_RedoList, answer)
            redone = replace(
                redone,
                documents=redone.documents + found.documents,
                selected=redone.selected + found.selected,
            )
        return redone

    def reprocess_jobs(self) -> list[ReprocessJobView]:
        """Return the newest reprocess jobs, the newest first."""
        answer = self._ask("GET", "/reprocess-jobs", params={"limit": str(_JOBS_LISTED)})
        return _parse(_ReprocessJobs, answer).jobs

    def reprocess_job(self, job_id: str) -> ReprocessJobView:
        """Return the job with this id or with the only id that begins like this."""
        path = f"/reprocess-jobs/{quote(self._whole_job_id(job_id), safe='')}"
        return _parse(ReprocessJobView, self._ask("GET", path))

    def cancel_reprocess_job(self, job_id: str) -> bool:
        """Cancel the job; the runs that it has added go on. Return False if it had ended."""
        path = f"/reprocess-jobs/{quote(self._whole_job_id(job_id), safe='')}/cancel"
        return _parse(_CancelAnswer, self._ask("POST", path)).cancelled

    def _whole_job_id(self, typed: str) -> str:
        if not _ID_PREFIX.fullmatch(typed):
            return typed.replace("/", "-") or "-"
        found = [job.id for job in self.reprocess_jobs() if job.id.startswith(typed)]
        return found[0] if len(found) == 1 else typed

    def _path(self, document_id: str) -> str:
        """Return the document's path; the id is one segment of it, whatever was typed."""
        return f"/documents/{quote(self._whole_id(document_id), safe='') or '-'}"

    def _whole_id(self, typed: str) -> str:
        """Return the id that begins with these digits; anything else unchanged.

        Raises NotFound if no document has it, and InvalidOptions if several have.
        """
        if "/" in typed:
            # Even quoted, it would be a path of two segments to the service.
            raise NotFound(f"No document {typed}.")
        if not _ID_PREFIX.fullmatch(typed):
            return typed
        found = [view.id for view in self.documents({"id_prefix": typed}, _CANDIDATES_SHOWN + 1)]
        if not found:
            raise NotFound(f"No document {typed}.")
        if len(found) > 1:
            shown = ", ".join(found[:_CANDIDATES_SHOWN])
            more = ", …" if len(found) > _CANDIDATES_SHOWN else ""
            raise InvalidOptions(f"Several documents begin with {typed}: {shown}{more}.")
        return found[0]

    def _ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        answer = self._request(method, path, **request)
        if answer.is_success:
            return answer
        raise _error(answer)

    def _request(self, method: str, path: str, **request: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **request)
        except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
            raise AnswerTimeout(
                f"The service at {self._url} is there, but has not answered for "
                f"{self._http.timeout.read:g} s ({describe_error(error)}). It may still carry out "
                "the request: look with `rag-service status` before you repeat it."
            ) from error
        except httpx.TransportError as error:
            raise ServiceUnreachable(
                f"The service does not answer at {self._url} ({describe_error(error)}). "
                "Start it with `rag-service up`, or set RAG_SERVICE_URL to its address."
            ) from error


class _Backlog(BacklogFull):
    """BacklogFull with the seconds after which to try again."""

    seconds: float = _BACKLOG_SECONDS


def _error(answer: httpx.Response) -> RagServiceError:
    """Return the error of the code in the service's problem details."""
    try:
        problem = answer.json()
        code, detail = problem["code"], problem["detail"]
    except (ValueError, KeyError, TypeError):
        return _error_without_problem(answer)
    if code == BacklogFull.code:
        full = _Backlog(detail)
        full.seconds = _retry_after(answer)
        return full
    return error_classes().get(code, RagServiceError)(detail)


def _error_without_problem(answer: httpx.Response) -> RagServiceError:
    """Return the error for an answer of a proxy or of another program at the address."""
    source = f"{answer.request.url.copy_with(query=None)} answered {answer.status_code}"
    if answer.status_code == HTTPStatus.UNAUTHORIZED:
        return Unauthorized()
    if answer.is_server_error:
        return ServiceUnreachable(f"{source}; the service itself did not answer.")
    return ServiceUnreachable(f"{source}; this is not rag_service. Check RAG_SERVICE_URL.")


def error_classes() -> dict[str, type[RagServiceError]]:
    """Return the class of each code; for a code of a document and a page, the document's."""
    classes: dict[str, type[RagServiceError]] = {}
    waiting = [RagServiceError]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if "code" in vars(kind) and not (kind.code in classes and issubclass(kind, PageError)):
            classes[kind.code] = kind
    return classes


def _retry_after(answer: httpx.Response) -> float:
    value = answer.headers.get("retry-after", "")
    return max(1.0, float(value)) if value.isdecimal() else _BACKLOG_SECONDS


def _parse(view: type[View], answer: httpx.Response) -> View:
    try:
        return view.model_validate_json(answer.content)
    except ValidationError as error:
        raise ServiceUnreachable(
            f"{answer.request.url.copy_with(query=None)}: this version cannot read the answer "
            f"({error.error_count()} differences). Is the service of the same version?"
        ) from error


def _upload_name(path: Path) -> str:
    """Return the name with a space for each control character, as the service stores it.

    httpx escapes more characters than the standard, and the service could not undo that.
    """
    return "".join(letter if letter >= " " else " " for letter in path.name)


def _require_address(url: str) -> None:
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigurationError(f"api.url: {url}: {error} (RAG_SERVICE_URL).") from error
    if parts.scheme not in {"http", "https"} or not parts.host:
        raise ConfigurationError(f"api.url: {url} is not http://host:port (RAG_SERVICE_URL).")
