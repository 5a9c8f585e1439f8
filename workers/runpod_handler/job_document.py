"""A job's document as bytes: unpacked from the job itself, or downloaded."""

from __future__ import annotations

import base64
import binascii
import io
import zipfile
import zlib

from rag_service.config.options import HandlerOptions
from rag_service.runpod.job_format import InlineDocument, UrlDocument
from workers.runpod_handler.document_download import fetch
from workers.runpod_handler.faults import BadDocument, DocumentTooLarge


async def document_bytes(document: InlineDocument | UrlDocument, handler: HandlerOptions) -> bytes:
    """Return the document.

    Raises BadDocument, DocumentTooLarge, UrlRefused, DownloadFailed, DigestMismatch.
    """
    if isinstance(document, UrlDocument):
        return await fetch(document, handler)
    return unpack(document, handler.max_document_bytes)


def unpack(document: InlineDocument, max_bytes: int) -> bytes:
    """Return the document of an inline job. Raises BadDocument, DocumentTooLarge."""
    try:
        data = base64.b64decode(document.data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadDocument(f"The document is not base64: {error}") from error
    if document.encoding == "zip+base64":
        data = _unzip(data, max_bytes)
    if len(data) > max_bytes:
        raise DocumentTooLarge(_too_large(max_bytes))
    return data


def _unzip(data: bytes, max_bytes: int) -> bytes:
    """Return the archive's only file; the sizes in its directory are not trusted."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = archive.infolist()
            if len(files) != 1:
                raise BadDocument(f"The ZIP must hold one file; it holds {len(files)}.")
            with archive.open(files[0]) as file:
                content = file.read(max_bytes + 1)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as error:
        raise BadDocument(f"The ZIP cannot be read: {error}") from error
    if len(content) > max_bytes:
        raise DocumentTooLarge(_too_large(max_bytes))
    return content


def _too_large(max_bytes: int) -> str:
    return f"The document has more than {max_bytes} bytes (handler.max_document_bytes)."
