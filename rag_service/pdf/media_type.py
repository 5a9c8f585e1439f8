"""The type of a file, from its first bytes and never from its name."""

from __future__ import annotations

PDF = "application/pdf"
# Readers accept a PDF header anywhere in the first kilobyte (PDF 1.7, appendix H.3).
HEAD_BYTES = 1024

_PNG, _JPEG, _TIFF, _WEBP = "image/png", "image/jpeg", "image/tiff", "image/webp"
IMAGES = frozenset({_PNG, _JPEG, _TIFF, _WEBP})
_SIGNATURES = {
    b"\x89PNG": _PNG,
    b"\xff\xd8\xff": _JPEG,
    b"II*\0": _TIFF,
    b"MM\0*": _TIFF,
}
# Canon's raw format is a TIFF file with this mark at byte 8; Pillow does not read it.
_CANON_RAW = b"CR"


def media_type_of(head: bytes) -> str | None:
    """Return the media type of a file that begins with these bytes, or None if unsupported."""
    if b"%PDF" in head[:HEAD_BYTES]:
        return PDF
    if head[:4] == b"RIFF" and head[8:14] == b"WEBPVP":
        return _WEBP
    found = next((kind for mark, kind in _SIGNATURES.items() if head.startswith(mark)), None)
    if found == _TIFF and (len(head) < 10 or head[8:10] == _CANON_RAW):
        return None
    return found
