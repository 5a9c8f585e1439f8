"""Which OCR server this process uses, as claims and doorbells need to know it."""

from __future__ import annotations

from rag_service.ocr.client import server_url
from rag_service.settings import get_settings


def ocr_server() -> str | None:
    """The configured server's URL, or None where none is set."""
    settings = get_settings().ocr
    return server_url(settings) if settings.base_url else None
