"""Why a job ends FAILED, each by a name that stands in its error. Raised within this package."""

from __future__ import annotations

from rag_service.errors import RagServiceError


class InvalidJob(RagServiceError):
    code = "invalid_job"
    default_message = "The job's input is not a job of version 1."


class UnsupportedVersion(RagServiceError):
    code = "unsupported_version"
    default_message = "The job is of a version that this handler does not speak."


class UnsupportedLayout(RagServiceError):
    code = "unsupported_layout"
    default_message = "This handler does not read pages in the layout asked for."


class BadDocument(RagServiceError):
    code = "bad_document"
    default_message = "The job's document cannot be unpacked."


class PagesMismatch(RagServiceError):
    code = "pages_mismatch"
    default_message = "The document does not have as many pages as the job names."


class DocumentTooLarge(RagServiceError):
    code = "document_too_large"
    default_message = "The document is larger than handler.max_document_bytes."


class UrlRefused(RagServiceError):
    code = "url_refused"
    default_message = "The document's URL is not one that the handler fetches from."


class DownloadFailed(RagServiceError):
    code = "download_failed"
    default_message = "The document could not be fetched from its URL."


class DigestMismatch(RagServiceError):
    code = "sha256_mismatch"
    default_message = "What the URL holds is not the document that was meant."


class ServerUnhealthy(RagServiceError):
    code = "ocr_server_unhealthy"
    default_message = "The OCR server beside the handler does not answer pages."


class ClaimLost(RagServiceError):
    code = "claim_lost"
    default_message = "Another job of the same key has taken this job's work over."
