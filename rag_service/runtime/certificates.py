"""The certificates that clients of other services trust, read once a process.

Reading them takes some 20 ms of CPU, and a new client for each document would do it each time.
"""

from __future__ import annotations

import ssl
from functools import cache

import httpx


@cache
def trusted() -> ssl.SSLContext:
    """What httpx trusts by itself; shared, so not to be changed."""
    return httpx.create_ssl_context()
