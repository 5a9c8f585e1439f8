"""Values with a unit: times such as 30s or 2h, sizes such as 500MB or 2GiB.

A plain number keeps its meaning: seconds, bytes or MiB. Anything else is left for the type check,
or refused with a sentence that shows the form.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError

_MEBIBYTE = 1 << 20
# Seconds in each unit. Neither durationpy ("5mm" is five months) nor pydantic (ISO 8601 only)
# reads what people write.
_SECONDS = {
    "ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400,
}  # fmt: skip
_PART = r"(\d+(?:\.\d+)?)\s*([a-z]+)"
_TIME = re.compile(rf"{_PART}(?:\s*{_PART})*")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?")
_SIZE = TypeAdapter(ByteSize)


def parse_seconds(value: Any) -> Any:
    """Return the seconds of `90s`, `1h 30m` or `2 min`; another value unchanged.

    Raises ValueError if the text is neither a number nor a time.
    """
    text = _text_with_unit(value)
    if text is None:
        return value
    parts = re.findall(_PART, text) if _TIME.fullmatch(text) else []
    if not parts or any(unit not in _SECONDS for _, unit in parts):
        raise ValueError("must be seconds, or a time such as 30s, 5min, 2h or 1d")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def parse_bytes(value: Any) -> Any:
    """Return the bytes of `500MB`, `1.5 GiB` or `64k`; another value unchanged.

    Raises ValueError if the text is neither a number nor a size.
    """
    text = _text_with_unit(value)
    if text is None:
        return value
    try:
        return int(_SIZE.validate_python(text))
    except ValidationError:
        raise ValueError("must be bytes, or a size such as 500MB, 1GB or 2GiB") from None


def parse_mebibytes(value: Any) -> Any:
    """Return the MiB of `2GB` or `512MiB`, rounded down; another value unchanged.

    Raises ValueError if the text is neither a number nor a size.
    """
    if _text_with_unit(value) is None:
        return value
    try:
        return int(parse_bytes(value)) // _MEBIBYTE
    except ValueError:
        raise ValueError("must be MiB, or a size such as 512MiB or 2GB") from None


def _text_with_unit(value: Any) -> str | None:
    """Return the text in lower case if it is more than a number, else None."""
    if not isinstance(value, str):
        return None
    text = value.strip().lower()
    return None if _NUMBER.fullmatch(text) else text
