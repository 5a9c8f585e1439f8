"""The error tree: one class per cause, with its code, whether a redo may help, and a sentence.

Everything raised on purpose derives from RagServiceError:

RagServiceError
├── DocumentError          the document ends `failed` with this code
│   ├── UnsupportedType, EmptyFile, CorruptPdf, EmptyPdf, EncryptedPdf, WrongPassword
│   ├── TooLarge, TooManyPages, DocumentTimeout, WorkerCrashed, SourceMissing
│   └── PagesFailed, Cancelled, StorageUnavailable, OcrUnavailable, Internal
├── PageError              one page ends `failed` with this code
│   ├── PageTooLarge, PageTimeout, PageUnrenderable
│   ├── LayoutUnavailable, OcrRejected, OcrEmpty, OcrRepetition, PayloadTooLarge
│   └── RemoteJobFailed, …TimedOut, …Expired, …Cancelled, RemoteResultMissing
├── RequestError           HTTP only: no row is made or changed
│   └── Unauthorized, NotFound, InvalidOptions, OptionsDiffer, AlreadyActive, BacklogFull
├── FlowSignal             a worker lets go of a run; nobody's fault, no code of its own
│   └── LeaseLost, OcrOutage ── OcrMisconfigured, Draining
├── ConfigurationError     the start-up stops and names the key
├── ServiceUnreachable     a command cannot reach what it needs
└── Unreadable             a command was given a file that it cannot read
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, ClassVar


class RagServiceError(Exception):
    """Something went wrong in rag_service."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str | None = None, *, page: int | None = None) -> None:
        self.message = message or (type(self).__doc__ or "").strip().splitlines()[0]
        self.page = page
        super().__init__(self.message)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.page))


def _rebuild(cls: type[RagServiceError], message: str, page: int | None) -> RagServiceError:
    return cls(message, page=page)


class DocumentError(RagServiceError):
    """The document could not be processed."""


class UnsupportedType(DocumentError):
    """This is not a PDF, PNG, JPEG, TIFF or WebP file."""

    code = "unsupported_type"


class EmptyFile(DocumentError):
    """The file has no bytes."""

    code = "empty_file"


class CorruptPdf(DocumentError):
    """The file is damaged and cannot be opened, not even after repair."""

    code = "corrupt_pdf"


class EmptyPdf(DocumentError):
    """The file opens but has no pages."""

    code = "empty_pdf"


class EncryptedPdf(DocumentError):
    """The PDF asks for a password. Redo it with --password-file."""

    code = "encrypted_pdf"


class WrongPassword(DocumentError):
    """The password does not open this PDF."""

    code = "wrong_password"


class TooLarge(DocumentError):
    """The file is larger than limits.max_bytes."""

    code = "too_large"


class TooManyPages(DocumentError):
    """The document has more pages than limits.max_pages."""

    code = "too_many_pages"


class DocumentTimeout(DocumentError):
    """The document used up its time: document_timeout.base + per_page x pages."""

    code = "document_timeout"


class WorkerCrashed(DocumentError):
    """Workers died on this document as often as allowed; redo it by its ID only."""

    code = "worker_crashed"


class SourceMissing(DocumentError):
    """The stored bytes of this document are gone."""

    code = "source_missing"


class StorageUnavailable(DocumentError):
    """The store of document bytes cannot be reached."""

    code = "storage_unavailable"
    retryable = True


class OcrUnavailable(DocumentError):
    """No page was answered by the OCR server for ocr.outage_limit."""

    code = "ocr_unavailable"
    retryable = True


class PagesFailed(DocumentError):
    """Some pages could not be read."""

    code = "pages_failed"


class Cancelled(DocumentError):
    """Cancelled on request."""

    code = "cancelled"


class Internal(DocumentError):
    """An error of ours; the log has the details."""

    code = "internal"


class PageError(RagServiceError):
    """The page could not be read."""


class PageTooLarge(PageError):
    """The page is so large that the pixel cap would leave less than 50 DPI."""

    code = "page_too_large"


class PageTimeout(PageError):
    """The page took longer than pdf.page_time_limit to render or extract."""

    code = "page_timeout"


class PageUnrenderable(PageError):
    """The page cannot be rendered."""

    code = "page_unrenderable"


class LayoutUnavailable(PageError):
    """The layout server did not answer."""

    code = "layout_unavailable"
    retryable = True


class OcrRejected(PageError):
    """The OCR server refused the page."""

    code = "ocr_rejected"


class OcrEmpty(PageError):
    """The page has ink, but the OCR server returned no usable text."""

    code = "ocr_empty"


class OcrRepetition(PageError):
    """The OCR server returned nothing but a loop, twice."""

    code = "ocr_repetition"


class PayloadTooLarge(PageError):
    """The page is too large for a job, even shrunk to 100 DPI."""

    code = "payload_too_large"


class RemoteJobFailed(PageError):
    """The job that held the page failed on the remote service."""

    code = "remote_job_failed"
    retryable = True


class RemoteJobTimedOut(PageError):
    """The job that held the page did not end in its time."""

    code = "remote_job_timed_out"
    retryable = True


class RemoteJobExpired(PageError):
    """The job that held the page was dropped by the remote service before its result was taken."""

    code = "remote_job_expired"
    retryable = True


class RemoteJobCancelled(PageError):
    """The job that held the page was cancelled on the remote service by somebody else."""

    code = "remote_job_cancelled"
    retryable = True


class RemoteResultMissing(PageError):
    """The job ended without the page's result."""

    code = "remote_result_missing"
    retryable = True


class RequestError(RagServiceError):
    """The request cannot be carried out."""


class Unauthorized(RequestError):
    """A valid key is needed: Authorization: Bearer <RAG_SERVICE_API_KEY>."""

    code = "unauthorized"


class NotFound(RequestError):
    """There is no such document."""

    code = "not_found"


class InvalidOptions(RequestError):
    """The options are not valid."""

    code = "invalid_options"


class OptionsDiffer(RequestError):
    """This file is already here with other options; use reprocess to change them."""

    code = "options_differ"


class AlreadyActive(RequestError):
    """This document is being worked on already."""

    code = "already_active"


class BacklogFull(RequestError):
    """Too many documents wait already; try again later."""

    code = "backlog_full"
    retryable = True


class FlowSignal(RagServiceError):
    """A worker lets go of its run without blame."""


class LeaseLost(FlowSignal):
    """The run is no longer ours: its lease ran out or it was cancelled."""


class OcrOutage(FlowSignal):
    """The OCR server does not answer; the run is parked until it does."""


class OcrMisconfigured(OcrOutage):
    """The OCR server refuses our key or does not know the model; runs wait as in an outage."""


class Draining(FlowSignal):
    """The worker is shutting down; the run goes back to the queue."""


class ConfigurationError(RagServiceError):
    """The configuration is not valid."""

    code = "configuration"


class ServiceUnreachable(RagServiceError):
    """A service that this command needs cannot be reached."""

    code = "unreachable"
    retryable = True


class Unreadable(RagServiceError):
    """The file cannot be read."""

    code = "unreadable"


def outcome_codes() -> frozenset[str]:
    """The codes that documents and pages end with: a closed list."""
    return frozenset(kind.code for base in (DocumentError, PageError) for kind in _tree(base))


def _tree(kind: type[RagServiceError]) -> Iterator[type[RagServiceError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _tree(below)


def require_outcome_code(code: str) -> str:
    """The code itself; InvalidOptions, with those that may have been meant, for an unknown one."""
    codes = outcome_codes()
    if code in codes:
        return code
    near = difflib.get_close_matches(code, sorted(codes), n=3)
    hint = (
        f"Did you mean {' or '.join(near)}?" if near else f"There are: {', '.join(sorted(codes))}."
    )
    raise InvalidOptions(f"error: there is no code {code!r}. {hint}")
