"""Starts HTTP processes of the service and waits until they answer."""

from __future__ import annotations

import sys

import httpx

from tests.net import free_port
from tests.processes import Programs


def start_api(programs: Programs, **variables: str) -> str:
    """Start the API and return its URL when it answers."""
    return _start(programs, "serve", "RAG_SERVICE_API_PORT", "/health/live", variables)


def start_cpu_server(programs: Programs) -> str:
    """Start the CPU OCR server and return its URL when its engine is loaded."""
    return _start(programs, "cpu-ocr-server", "RAG_SERVICE_CPU_OCR_PORT", "/health", {})


def _start(
    programs: Programs, command: str, port_variable: str, path: str, variables: dict[str, str]
) -> str:
    port = str(free_port())
    argv = [sys.executable, "-m", "rag_service.cli.main", command]
    programs.start(command, argv, **{port_variable: port}, **variables)
    url = f"http://127.0.0.1:{port}"
    programs.wait_until(lambda: _answers(url + path), f"{command} answers")
    return url


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10).status_code == 200
    except httpx.TransportError:
        return False
