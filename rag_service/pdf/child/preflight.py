"""Opens and unlocks a PDF, or raises the error that says why not. Runs in the render child."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rag_service.errors import (
    CorruptPdf,
    EmptyFile,
    EmptyPdf,
    EncryptedPdf,
    UnsupportedType,
    WrongPassword,
)
from rag_service.pdf.child.memory_shortage import is_shortage
from rag_service.pdf.child.mupdf import mupdf, pymupdf
from rag_service.pdf.media_type import IMAGES, media_type_of

# Some producers write mail headers or a whole web page before %PDF.
HEADER_BYTES = 1 << 16
# The bit that pymupdf's authenticate() returns for a user password.
USER_PASSWORD = 2

MUPDF_ERRORS = (mupdf.FzErrorBase, RuntimeError, ValueError, MemoryError)
# "Failed to open file '/…/' as type pdf."
_NAMED_FILE = re.compile(r"\s*\b(?:file\s+)?'[^']*/[^']*'")


def image_type(path: Path) -> str | None:
    """Return the media type of a picture file, None for any other file. Raises EmptyFile."""
    kind = media_type_of(_head(path))
    return kind if kind in IMAGES else None


def open_pdf(path: Path, password: str | None) -> Any:
    """Return an unlocked pymupdf Document with at least one page.

    Raises UnsupportedType, CorruptPdf, EncryptedPdf, WrongPassword, EmptyPdf.
    """
    has_pdf_header = b"%PDF" in _head(path)
    try:
        document = pymupdf.open(path, filetype="pdf")
        unlock(document, password)
        if not document.is_pdf:
            raise UnsupportedType
        pages = document.page_count
    except MUPDF_ERRORS as error:
        raise CorruptPdf(_reason(error)) if has_pdf_header else UnsupportedType() from error
    if pages < 1:
        raise EmptyPdf
    return document


def unlock(document: Any, password: str | None) -> None:
    """Use the password if one is needed. Raises EncryptedPdf or WrongPassword."""
    if not document.needs_pass:
        return
    # An empty owner password would open a file whose user password was not given.
    if not password:
        if not document.authenticate("") & USER_PASSWORD:
            raise EncryptedPdf
    elif not document.authenticate(password):
        raise WrongPassword


def decrypt(path: Path, password: str, target: Path) -> None:
    """Write an unencrypted copy. Raises EncryptedPdf, WrongPassword, CorruptPdf."""
    document = open_pdf(path, password)
    try:
        document.save(target, encryption=pymupdf.PDF_ENCRYPT_NONE)
    except MUPDF_ERRORS as error:
        raise CorruptPdf(_reason(error)) from error
    finally:
        document.close()


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    if not head:
        raise EmptyFile
    return head


def _reason(error: BaseException) -> str:
    """Return MuPDF's message without the file's path, which users must not see."""
    if is_shortage(error):
        return "Opening the file needs more memory than pdf.child_max_mib."
    message = _NAMED_FILE.sub("", (str(error).splitlines() or [""])[0])[:200].strip()
    return f"{CorruptPdf().message} ({message})" if message else CorruptPdf().message
