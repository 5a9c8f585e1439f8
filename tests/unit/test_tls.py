"""A new client for each document does not read the certificates again."""

from __future__ import annotations

import ssl

import pytest
from pydantic import SecretStr

from rag_service.config.loader import get_settings
from rag_service.layout.layout_client import LayoutClient
from rag_service.ocr.ocr_client import OcrClient
from rag_service.runpod.runpod_client import RunPodClient
from rag_service.runtime import http_client


def test_clients_of_one_process_read_the_certificates_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    real = ssl.create_default_context

    def counted(*arguments: object, **options: object) -> ssl.SSLContext:
        read.append(options)
        return real(*arguments, **options)

    monkeypatch.setattr(ssl, "create_default_context", counted)
    http_client.trusted_certificates.cache_clear()
    settings = get_settings()
    ocr = settings.ocr.model_copy(update={"base_url": "https://ocr.example"})
    runpod = settings.runpod.model_copy(update={"api_key": SecretStr("key")})
    for _ in range(3):
        OcrClient(ocr, connections=1)
        LayoutClient(settings)
        RunPodClient(runpod, base_url="https://api.example/v2", endpoint_id="ep")
    assert len(read) == 1
