"""Why a job ends FAILED, each by a name that stands in its error. Raised within this package."""

from __future__ import annotations

from rag_service.errors import RagServiceError


class InvalidJob(RagServiceError):
    """The job's input is not a job of version 1."""

    code = "invalid_job"


class UnsupportedVersion(RagServiceError):
    """The job is of a version that this handler does not speak."""

    code = "unsupported_version"


class UnsupportedLayout(RagServiceError):
    """This handler does not read pages in the layout asked for."""

    code = "unsupported_layout"


class BadDocument(RagServiceError):
    """The job's document cannot be unpacked."""

    code = "bad_document"


class PagesMismatch(RagServiceError):
    """The document does not have as many pages as the job names."""

    code = "pages_mismatch"


class DocumentTooLarge(RagServiceError):
    """The document is larger than handler.max_document_bytes."""

    code = "document_too_large"


class UrlRefused(RagServiceError):
    """The document's URL is not one that the handler fetches from."""

    code = "url_refused"


class DownloadFailed(RagServiceError):
    """The document could not be fetched from its URL."""

    code = "download_failed"


class DigestMismatch(RagServiceError):
    """What the URL holds is not the document that was meant."""

    code = "sha256_mismatch"


class ServerUnhealthy(RagServiceError):
    """The OCR server beside the handler does not answer pages."""

    code = "ocr_server_unhealthy"


class ClaimLost(RagServiceError):
    """Another job of the same key has taken this job's work over."""

    code = "claim_lost"
