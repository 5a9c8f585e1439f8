"""One log format for every process. Called once at each process's start."""

from __future__ import annotations

import logging

from rag_service.config.options import Settings

_FORMAT = "%(asctime)s %(levelname)s %(name)s [%(process)d] %(message)s"
# These say at INFO what we say ourselves, once a request.
_QUIET = ("httpx", "httpcore", "alembic", "kombu", "uvicorn.access")
# It warns of every bad body, whose sender is told by us.
_MUTED = ("python_multipart",)


def configure_logging(settings: Settings) -> None:
    """Log to stderr at the configured level."""
    logging.basicConfig(level=settings.log_level, format=_FORMAT, force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in _MUTED:
        logging.getLogger(name).setLevel(logging.ERROR)
