"""The two keys of a job: the request key that its handler gets, and its webhook's token."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def request_key(run_id: str, options_digest: str, pages: Sequence[int]) -> str:
    """Return the key under which the handler does the work of a request once."""
    digest = hashlib.sha256(",".join(map(str, pages)).encode()).hexdigest()[:16]
    return f"{run_id}:{options_digest}:{digest}"


def token_digest(token: str) -> str:
    """Return what is stored of a webhook's token: its sha256 in hexadecimal."""
    return hashlib.sha256(token.encode()).hexdigest()
