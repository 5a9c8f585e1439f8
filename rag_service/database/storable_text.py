"""Cleaning of text from outside before it is stored in PostgreSQL."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# PostgreSQL rejects NUL in text and JSONB. In files it usually stands for a space.
_UNSTORABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff\ud800-\udfff]")


def clean(text: str) -> str:
    """Replace NUL by a space; remove other control characters, surrogates and noncharacters."""
    return _UNSTORABLE.sub(lambda match: " " if match[0] == "\x00" else "", text)


def clean_tree(value: Any) -> Any:
    """Clean every string of a JSON-like value, keys included."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {clean(str(key)): clean_tree(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [clean_tree(item) for item in value]
    return value
