"""The parsers by name. Intake checks names against it, the ocr worker makes them from it."""

from __future__ import annotations

from rag_service.config.options import Settings
from rag_service.errors import InvalidOptions
from rag_service.parsers.contract import Parser

PARSERS = frozenset({"glmocr"})


def require_parser(name: str) -> str:
    """The name itself; InvalidOptions where there is no such parser."""
    if name not in PARSERS:
        raise InvalidOptions(f"There is no parser {name!r}; choose from: {', '.join(PARSERS)}.")
    return name


def make_parser(name: str, settings: Settings) -> Parser:
    """A parser ready to read pages. Raises InvalidOptions, ConfigurationError."""
    require_parser(name)
    # Heavy imports stay in the process that reads pages.
    from rag_service.parsers.glmocr import GlmOcr

    return GlmOcr(settings)
