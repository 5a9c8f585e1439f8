"""The error tree: one class per cause, with its code and its default message.

Everything raised on purpose derives from RagServiceError:

RagServiceError
├── DocumentError          the document ends `failed` with this code
│   ├── UnsupportedType, EmptyFile, CorruptPdf, EmptyPdf, EncryptedPdf, WrongPassword
│   ├── TooLarge, TooManyPages, DocumentTimeout, WorkerCrashed, SourceMissing
│   ├── StorageUnavailable ── StoreUnreachable; DatabaseUnavailable, OcrUnavailable
│   └── PagesFailed, Cancelled, Internal
├── PageError              one page ends `failed` with this code
│   ├── PageTooLarge, PageTimeout, PageUnrenderable, PayloadTooLarge
│   ├── LayoutUnavailable, OcrFailed, OcrRejected, OcrEmpty, OcrRepetition
│   └── RemoteJobFailed, …TimedOut, …Expired, …Cancelled, RemoteResultMissing
├── RequestError           HTTP only: no row is added or changed
│   ├── Unauthorized, Forbidden, NotFound, MethodNotAllowed
│   └── InvalidOptions, OptionsDiffer, AlreadyActive, BacklogFull
├── FlowSignal             a worker releases its run; the document is not charged; has no code
│   └── LeaseLost, OcrOutage ── OcrMisconfigured, Draining, GaveWay, ProcessInTrouble
├── ConfigurationError     the start-up stops and names the key
├── ServiceUnreachable     a command cannot reach a service that it needs
│   └── AnswerTimeout
└── Unreadable             a command was given a file that it cannot read
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, ClassVar


class RagServiceError(Exception):
    """The base of all errors here. `retryable`: the same request, or a reprocess, may help."""

    code: ClassVar[str] = "internal"
    # An instance may differ from its class: pages_failed is what its pages are.
    retryable: bool = False
    default_message: ClassVar[str] = "Something went wrong in rag_service."

    def __init__(self, message: str | None = None, *, page: int | None = None) -> None:
        self.message = message or self.default_message
        self.page = page
        super().__init__(self.message)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.page))


def _rebuild(cls: type[RagServiceError], message: str, page: int | None) -> RagServiceError:
    return cls(message, page=page)


class DocumentError(RagServiceError):
    default_message = "The document could not be processed."


class UnsupportedType(DocumentError):
    code = "unsupported_type"
    default_message = "The file is not a PDF, PNG, JPEG, TIFF or WebP file."


class EmptyFile(DocumentError):
    code = "empty_file"
    default_message = "The file has no bytes."


class CorruptPdf(DocumentError):
    code = "corrupt_pdf"
    default_message = "The file is damaged and cannot be opened, not even after repair."


class EmptyPdf(DocumentError):
    code = "empty_pdf"
    default_message = "The file opens but has no pages."


class EncryptedPdf(DocumentError):
    code = "encrypted_pdf"
    default_message = "The PDF needs a password. Reprocess it with --password-file."


class WrongPassword(DocumentError):
    code = "wrong_password"
    default_message = "The password does not open this PDF."


class TooLarge(DocumentError):
    code = "too_large"
    default_message = "The file is larger than limits.max_bytes."


class TooManyPages(DocumentError):
    code = "too_many_pages"
    default_message = "The document has more pages than limits.max_pages."


class DocumentTimeout(DocumentError):
    code = "document_timeout"
    default_message = "The document used up its time: document_timeout.base + per_page x pages."


class WorkerCrashed(DocumentError):
    code = "worker_crashed"
    default_message = (
        "Worker processes died on this document as often as the limit allows; "
        "reprocess it by its ID only."
    )


class SourceMissing(DocumentError):
    code = "source_missing"
    default_message = "The stored bytes of this document are missing."


class StorageUnavailable(DocumentError):
    code = "storage_unavailable"
    retryable = True
    default_message = "The document store cannot be reached."


class StoreUnreachable(StorageUnavailable):
    default_message = "The document store is not there; documents wait for it."


class DatabaseUnavailable(DocumentError):
    code = "database_unavailable"
    retryable = True
    default_message = "PostgreSQL cannot be reached."


class OcrUnavailable(DocumentError):
    code = "ocr_unavailable"
    retryable = True
    default_message = "The OCR server answered no page for ocr.outage_limit."


class PagesFailed(DocumentError):
    code = "pages_failed"
    default_message = "Some pages could not be read."


class Cancelled(DocumentError):
    code = "cancelled"
    default_message = "Cancelled on request."


class Internal(DocumentError):
    code = "internal"
    default_message = "Internal error; the log has the details."


class PageError(RagServiceError):
    default_message = "The page could not be read."


class PageTooLarge(PageError):
    code = "page_too_large"
    default_message = "The page is so large that the pixel cap would leave less than 50 DPI."


class PageTimeout(PageError):
    code = "page_timeout"
    default_message = "The page took longer than pdf.page_time_limit to render or extract."


class PageUnrenderable(PageError):
    code = "page_unrenderable"
    default_message = "The page cannot be rendered."


class LayoutUnavailable(PageError):
    code = "layout_unavailable"
    retryable = True
    default_message = "The layout server did not answer."


class OcrFailed(PageError):
    code = "ocr_failed"
    retryable = True
    default_message = "The OCR server failed on the page, or did not answer, in all of its tries."


class OcrRejected(PageError):
    code = "ocr_rejected"
    default_message = "The OCR server refused the page."


class OcrEmpty(PageError):
    code = "ocr_empty"
    default_message = "The page has ink, but the OCR server returned no usable text."


class OcrRepetition(PageError):
    code = "ocr_repetition"
    default_message = "The OCR server returned only repeated text, twice."


class PayloadTooLarge(PageError):
    code = "payload_too_large"
    default_message = "The page is too large for a job, even at 100 DPI."


class RemoteJobFailed(PageError):
    code = "remote_job_failed"
    retryable = True
    default_message = "The page's job failed on the remote service."


class RemoteJobTimedOut(PageError):
    code = "remote_job_timed_out"
    retryable = True
    default_message = "The page's job did not end in time."


class RemoteJobExpired(PageError):
    code = "remote_job_expired"
    retryable = True
    default_message = "The remote service dropped the page's job before its result was fetched."


class RemoteJobCancelled(PageError):
    code = "remote_job_cancelled"
    retryable = True
    default_message = "The page's job was cancelled on the remote service, not by this service."


class RemoteResultMissing(PageError):
    code = "remote_result_missing"
    retryable = True
    default_message = "The page's job ended without a result for the page."


class RequestError(RagServiceError):
    default_message = "The request cannot be carried out."


class Unauthorized(RequestError):
    code = "unauthorized"
    default_message = "A valid key is needed: Authorization: Bearer <RAG_SERVICE_API_KEY>."


class Forbidden(RequestError):
    code = "forbidden"
    default_message = "Without RAG_SERVICE_API_KEY only programs on this machine may ask."


class NotFound(RequestError):
    code = "not_found"
    default_message = "No such document."


class MethodNotAllowed(RequestError):
    code = "method_not_allowed"
    default_message = "This address does not take this HTTP method."


class InvalidOptions(RequestError):
    code = "invalid_options"
    default_message = "The options are not valid."


class OptionsDiffer(RequestError):
    code = "options_differ"
    default_message = "This file was added before with other options; reprocess it to change them."


class AlreadyActive(RequestError):
    code = "already_active"
    default_message = "This document has an active run."


class BacklogFull(RequestError):
    code = "backlog_full"
    retryable = True
    default_message = "Too many documents are waiting; try again later."


class Busy(RequestError):
    code = "busy"
    retryable = True
    default_message = "The service has too many requests of this kind; try again later."


class FlowSignal(RagServiceError):
    default_message = "The worker releases its run without a charge."


class LeaseLost(FlowSignal):
    default_message = "The run's lease was lost: it expired, or the run was cancelled."


class OcrOutage(FlowSignal):
    default_message = "The OCR server does not answer; the run is parked until it does."


class OcrMisconfigured(OcrOutage):
    default_message = (
        "The OCR server refuses the key or does not know the model; the run is parked."
    )


class Draining(FlowSignal):
    default_message = "The worker is shutting down; the run goes back to the queue."


class GaveWay(FlowSignal):
    default_message = "The run had its turn; it gives its fork to runs that wait."


class ProcessInTrouble(FlowSignal):
    default_message = "The process lacks what it needs from the system; it ends."


class ConfigurationError(RagServiceError):
    code = "configuration"
    default_message = "The configuration is not valid."


class ServiceUnreachable(RagServiceError):
    code = "unreachable"
    retryable = True
    default_message = "A service that this command needs cannot be reached."


class AnswerTimeout(ServiceUnreachable):
    code = "answer_timeout"
    default_message = "The service took the request but has not answered in time."


class Unreadable(RagServiceError):
    code = "unreadable"
    default_message = "The file cannot be read."


# Outages of what a command needs: exit status 3, and an upload is tried again.
OUTAGES = (ServiceUnreachable, StorageUnavailable, DatabaseUnavailable)


def outcome_codes() -> frozenset[str]:
    """Return the codes that a document or a page can end with."""
    return frozenset(
        cls.code for base in (DocumentError, PageError) for cls in _with_subclasses(base)
    )


def _with_subclasses(cls: type[RagServiceError]) -> Iterator[type[RagServiceError]]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)


def require_outcome_code(code: str) -> str:
    """Return the code. Raises InvalidOptions, with similar codes, if there is no such code."""
    codes = outcome_codes()
    if code in codes:
        return code
    similar = difflib.get_close_matches(code, sorted(codes), n=3)
    hint = (
        f"Did you mean {' or '.join(similar)}?"
        if similar
        else f"Valid codes: {', '.join(sorted(codes))}."
    )
    raise InvalidOptions(f"error: unknown code {code!r}. {hint}")
