"""The parsers by name."""

from __future__ import annotations

from rag_service.config.options import Settings
from rag_service.errors import InvalidOptions
from rag_service.parsers.contract import Parser

PARSERS = frozenset({"glmocr"})


def require_parser(name: str) -> str:
    """Return the name. Raises InvalidOptions if there is no such parser."""
    if name not in PARSERS:
        raise InvalidOptions(f"There is no parser {name!r}; choose from: {', '.join(PARSERS)}.")
    return name


def make_parser(name: str, settings: Settings) -> Parser:
    """Return a parser that is ready to read pages. Raises InvalidOptions, ConfigurationError."""
    require_parser(name)
    # Imported late, as only the process that reads pages needs the heavy modules.
    from rag_service.parsers.glmocr import GlmOcr

    return GlmOcr(settings)
