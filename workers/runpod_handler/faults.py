"""The faults with which a job ends as FAILED. Each has a code, which the job's error contains."""

from __future__ import annotations

from rag_service.errors import RagServiceError


class InvalidJob(RagServiceError):
    code = "invalid_job"
    default_message = "The job's input does not have the format of version 1."


class UnsupportedVersion(RagServiceError):
    code = "unsupported_version"
    default_message = "This handler does not support the version of the job."


class UnsupportedLayout(RagServiceError):
    code = "unsupported_layout"
    default_message = "This handler cannot read pages with the requested layout."


class BadDocument(RagServiceError):
    code = "bad_document"
    default_message = "The job's document cannot be unpacked."


class PagesMismatch(RagServiceError):
    code = "pages_mismatch"
    default_message = "The document's number of pages is not the number of pages in the job."


class DocumentTooLarge(RagServiceError):
    code = "document_too_large"
    default_message = "The document is larger than handler.max_document_bytes."


class UrlRefused(RagServiceError):
    code = "url_refused"
    default_message = "The handler does not download from the document's URL."


class DownloadFailed(RagServiceError):
    code = "download_failed"
    default_message = "The document could not be downloaded from its URL."


class DigestMismatch(RagServiceError):
    code = "sha256_mismatch"
    default_message = "The content of the URL does not have the document's sha256."


class ServerUnhealthy(RagServiceError):
    code = "ocr_server_unhealthy"
    default_message = "The OCR server in the worker does not answer page requests."


class ClaimLost(RagServiceError):
    code = "claim_lost"
    default_message = "Another job with the same request key has taken over this job's work."
