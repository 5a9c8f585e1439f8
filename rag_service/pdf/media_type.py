"""Tells a file's type by its first bytes, never by its name. Used by intake."""

from __future__ import annotations

import filetype

PDF = "application/pdf"
IMAGES = frozenset({"image/png", "image/jpeg", "image/tiff", "image/webp"})
# Readers accept a PDF header anywhere in the first kilobyte (PDF 1.7, appendix H.3).
HEAD_BYTES = 1024


def media_type_of(head: bytes) -> str | None:
    """The media type of a file that begins with these bytes, None where we do not read it."""
    if b"%PDF" in head[:HEAD_BYTES]:
        return PDF
    kind = filetype.guess(head)
    return kind.mime if kind is not None and kind.mime in IMAGES else None
