"""Text made fit for PostgreSQL: the one place every string from outside passes before a row."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# PostgreSQL refuses NUL in text and JSONB; where files hold it, it stands for a space.
_UNSTORABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff\ud800-\udfff]")


def clean(text: str) -> str:
    """NUL becomes a space; other control characters, lone surrogates and noncharacters go."""
    return _UNSTORABLE.sub(lambda match: " " if match[0] == "\x00" else "", text)


def clean_tree(value: Any) -> Any:
    """The same for every string of a JSON-like value, keys included."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {clean(str(key)): clean_tree(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [clean_tree(item) for item in value]
    return value
