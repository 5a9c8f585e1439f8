"""The one HTTP client of our own API, for the commands: typed answers, our errors by their code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
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
    BacklogFull,
    ConfigurationError,
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
    ServerView,
    WholePageView,
)
from rag_service.runtime.http_client import describe_error
from rag_service.states import RunState

_CONNECT_SECONDS = 5.0
# An answer waits for the upload's hash and its store, S3 included.
_ANSWER_SECONDS = 300.0
_LISTED = 100
_PAGES = 100
_MOST_IDS = 1000
# Uploads are idempotent by their sha256, so a broken connection is worth a few more tries.
_RETRY_WAITS = (1.0, 3.0, 9.0)
_BACKLOG_SECONDS = 10.0

View = TypeVar("View", bound=BaseModel)


class Sent(BaseModel):
    """What became of an upload."""

    id: str
    status: RunState
    duplicate: bool


class _Listing(BaseModel):
    documents: list[DocumentView]
    next_cursor: str | None


class _Cancelled(BaseModel):
    cancelled: bool


class _Redone(BaseModel):
    documents: list[Redo]


class _Jobs(BaseModel):
    jobs: list[JobView]


class _Servers(BaseModel):
    servers: list[ServerView]


class _Pages(BaseModel):
    pages: list[PageView]
    next_after: int | None


class Client:
    """Asks the service at api.url; safe to use from several threads.

    Every method raises the error whose code the service answers, and ServiceUnreachable.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigurationError for an api.url that is no address."""
        self._closed = threading.Event()
        self._url = settings.api.url.rstrip("/")
        _require_address(self._url)
        key = settings.api.key
        self._http = httpx.Client(
            base_url=self._url,
            headers={"Authorization": f"Bearer {key.get_secret_value()}"} if key else {},
            timeout=httpx.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS),
            # A proxy of the environment is not for our own machine.
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
        """End what is under way in other threads too."""
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

        Waits for room as long as the service says that its backlog is full; `on_backlog` is told
        the seconds of each wait. Raises OSError where the file cannot be read.
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
                raise ServiceUnreachable("The upload was given up.")

    def _send_once(self, path: Path, fields: dict[str, str]) -> Sent:
        with path.open("rb") as file:
            answer = self._ask(
                "POST", "/documents", data=fields, files={"file": (_sent_name(path), file)}
            )
        return _parsed(Sent, answer)

    def document(self, document_id: str) -> DocumentView:
        return _parsed(DocumentView, self._ask("GET", f"/documents/{_part(document_id)}"))

    def documents(self, filters: dict[str, str], limit: int) -> list[DocumentView]:
        """The newest documents that the filters leave, at most `limit`."""
        found: list[DocumentView] = []
        cursor: dict[str, str] = {}
        while len(found) < limit:
            query = filters | cursor | {"limit": str(min(_LISTED, limit - len(found)))}
            listing = _parsed(_Listing, self._ask("GET", "/documents", params=query))
            found += listing.documents
            if listing.next_cursor is None:
                break
            cursor = {"cursor": listing.next_cursor}
        return found

    def pages(self, document_id: str) -> Iterator[PageView]:
        """The pages that answer for the document, in order, some at a time."""
        after = 0
        while True:
            answer = self._ask(
                "GET",
                f"/documents/{_part(document_id)}/pages",
                params={"after": str(after), "limit": str(_PAGES)},
            )
            batch = _parsed(_Pages, answer)
            yield from batch.pages
            if batch.next_after is None:
                return
            after = batch.next_after

    def page(self, document_id: str, number: int) -> WholePageView:
        path = f"/documents/{_part(document_id)}/pages/{number}"
        return _parsed(WholePageView, self._ask("GET", path))

    def jobs(self, document_id: str) -> list[JobView]:
        """What was posted to RunPod for the document, oldest first."""
        return _parsed(_Jobs, self._ask("GET", f"/documents/{_part(document_id)}/jobs")).jobs

    def servers(self) -> list[ServerView]:
        """The OCR servers that maintenance has looked at lately."""
        return _parsed(_Servers, self._ask("GET", "/servers")).servers

    def cancel(self, document_id: str) -> bool:
        """False where nothing was at work any more."""
        answer = self._ask("POST", f"/documents/{_part(document_id)}/cancel")
        return _parsed(_Cancelled, answer).cancelled

    def delete(self, document_id: str) -> None:
        self._ask("DELETE", f"/documents/{_part(document_id)}")

    def redo(self, document_id: str, changes: dict[str, Any]) -> Redo:
        """Redo one document; `changes` may hold a password."""
        path = f"/documents/{_part(document_id)}/reprocess"
        return _parsed(Redo, self._ask("POST", path, json=changes))

    def redo_many(self, wanted: dict[str, Any]) -> list[Redo]:
        """Redo what the selectors mean; any number of `ids`."""
        ids = wanted.get("ids", [])
        batches = [ids[i : i + _MOST_IDS] for i in range(0, len(ids), _MOST_IDS)] or [[]]
        redone: list[Redo] = []
        for batch in batches:
            answer = self._ask("POST", "/reprocess", json=wanted | {"ids": batch})
            redone += _parsed(_Redone, answer).documents
        return redone

    def _ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, path, **request)
        except httpx.TransportError as error:
            raise ServiceUnreachable(
                f"The service does not answer at {self._url} ({describe_error(error)}). "
                "Start it with `rag-service up`, or set RAG_SERVICE_URL to its address."
            ) from error
        if answer.is_success:
            return answer
        raise _error(answer)


class _Backlog(BacklogFull):
    """The backlog is full, with the time after which to ask again."""

    seconds: float = _BACKLOG_SECONDS


def _error(answer: httpx.Response) -> RagServiceError:
    """The error that the service's problem details name."""
    try:
        problem = answer.json()
        code, detail = problem["code"], problem["detail"]
    except (ValueError, KeyError, TypeError):
        return _foreign(answer)
    if code == BacklogFull.code:
        full = _Backlog(detail)
        full.seconds = _retry_after(answer)
        return full
    return error_classes().get(code, RagServiceError)(detail)


def _foreign(answer: httpx.Response) -> RagServiceError:
    """What stands in front of the service, or at its address in its place, answered."""
    where = f"{answer.request.url.copy_with(query=None)} answered {answer.status_code}"
    if answer.status_code == HTTPStatus.UNAUTHORIZED:
        return Unauthorized()
    if answer.is_server_error:
        return ServiceUnreachable(f"{where}; the service itself did not.")
    return ServiceUnreachable(f"{where}; that is not this service. Check RAG_SERVICE_URL.")


def error_classes() -> dict[str, type[RagServiceError]]:
    """The class of each code; for a code that documents and pages share, the document's."""
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


def _parsed(view: type[View], answer: httpx.Response) -> View:
    try:
        return view.model_validate_json(answer.content)
    except ValidationError as error:
        raise ServiceUnreachable(
            f"{answer.request.url.copy_with(query=None)} gave an answer that this version does "
            f"not understand ({error.error_count()} differences). Is it the same version?"
        ) from error


def _sent_name(path: Path) -> str:
    """The name with a space for each control character, as it is stored.

    The HTTP client would escape more of them than the standard, and nobody could undo it.
    """
    return "".join(letter if letter >= " " else " " for letter in path.name)


def _part(document_id: str) -> str:
    """An id as one part of a path, whatever was typed."""
    return quote(document_id, safe="") or "-"


def _require_address(url: str) -> None:
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigurationError(f"api.url: {url}: {error} (RAG_SERVICE_URL).") from error
    if parts.scheme not in {"http", "https"} or not parts.host:
        raise ConfigurationError(f"api.url: {url} is not http://host:port (RAG_SERVICE_URL).")
