"""Flower without credentials: only this machine's names for it are answered.

A web page in a browser on this machine could otherwise reach it under a name of its own that it
lets point to this machine (DNS rebinding).
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import flower.command
from flower.app import Flower
from tornado.httputil import HTTPServerRequest
from tornado.web import ErrorHandler

from rag_service.config.hosts import is_loopback


class LocalFlower(Flower):  # type: ignore[misc]
    """Flower that refuses requests for hosts other than loopback."""

    def find_handler(self, request: HTTPServerRequest, **kwargs: Any) -> Any:
        if is_loopback(urlsplit(f"//{request.host}").hostname or ""):
            return super().find_handler(request, **kwargs)
        return self.get_handler_delegate(request, ErrorHandler, {"status_code": 403})


def require_local_names() -> None:
    """Let `celery flower` in this process answer under loopback names alone."""
    flower.command.Flower = LocalFlower
