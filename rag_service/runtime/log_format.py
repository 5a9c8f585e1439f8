"""The log format of every process."""

from __future__ import annotations

import logging

from rag_service.config.options import Settings

_FORMAT = "%(asctime)s %(levelname)s %(name)s [%(process)d] %(message)s"
# At INFO these log every request, which this service logs itself.
_QUIET = ("httpx", "httpcore", "alembic", "kombu", "uvicorn.access")
# It warns of every malformed body; the client gets the error in the response.
_MUTED = ("python_multipart",)


def configure_logging(settings: Settings) -> None:
    """Log to stderr at the configured level. Call it once, when the process starts."""
    logging.basicConfig(level=settings.log_level, format=_FORMAT, force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in _MUTED:
        logging.getLogger(name).setLevel(logging.ERROR)
