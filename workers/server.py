"""Which OCR server this process uses, as claims and doorbells need to know it."""

from __future__ import annotations

from rag_service.settings import get_settings


def ocr_server() -> str | None:
    """The configured server's URL, or None where none is set."""
    return get_settings().page_server
