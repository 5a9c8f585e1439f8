"""The retry schedule of page requests to another service: a client raises TryAgain to use it.

Worth another request: no connection, a time-out, 502, 503, 504, and 429 after its Retry-After.
Any other exception ends the schedule at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

from rag_service.config.options import RetryOptions

log = logging.getLogger(__name__)

RETRYABLE_STATUS = frozenset({429, 502, 503, 504})
# The longest Retry-After that is obeyed.
LONGEST_RETRY_AFTER = 600.0
# "Retry-After: 0" would spend all requests of the schedule at once.
SHORTEST_RETRY_AFTER = 1.0

_DELAY_SECONDS = re.compile(r"[0-9]+(\.[0-9]+)?")


class TryAgain(Exception):
    """The request failed and may succeed later; `retry_after`: the server's Retry-After in seconds.

    The schedule raises the last one when its last request has failed too.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def page_schedule(
    settings: RetryOptions, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> AsyncRetrying:
    """Return a new schedule for one page, of at most len(settings.waits) + 1 requests.

    Use as `async for attempt in page_schedule(...): with attempt: ...` or call it with the
    function and its arguments. Raises the last TryAgain, and any other exception at once.
    """

    def wait(state: RetryCallState) -> float:
        # tenacity calls `wait` before `stop`, so also after the last attempt.
        if state.attempt_number > len(settings.waits):
            return 0.0
        error = state.outcome.exception() if state.outcome else None
        asked = error.retry_after if isinstance(error, TryAgain) else None
        return wait_before(state.attempt_number, settings, asked)

    return AsyncRetrying(
        sleep=sleep,
        stop=stop_after_attempt(len(settings.waits) + 1),
        wait=wait,
        retry=retry_if_exception_type(TryAgain),
        before_sleep=_log_retry,
        reraise=True,
    )


def wait_before(attempt: int, settings: RetryOptions, retry_after: float | None) -> float:
    """Return the seconds between the failed request `attempt` (from 1) and the next.

    The schedule's wait with ±jitter, or the server's Retry-After with upward jitter only.
    """
    planned = settings.waits[attempt - 1]
    if retry_after is None:
        return planned * random.uniform(1 - settings.jitter, 1 + settings.jitter)
    floor = min(planned, SHORTEST_RETRY_AFTER)
    asked = min(max(retry_after, floor), LONGEST_RETRY_AFTER)
    return asked * random.uniform(1, 1 + settings.jitter)


def parse_http_date(value: str | None) -> datetime | None:
    """Return a header's date with its time zone, or None if it is missing or not valid."""
    try:
        date = parsedate_to_datetime(value or "")
    except ValueError:
        return None
    return date.replace(tzinfo=UTC) if date.tzinfo is None else date


def parse_retry_after(value: str | None, now: datetime | None) -> float | None:
    """Return the seconds of a Retry-After header (RFC 9110, 10.2.3: a number or a date).

    Return None if the header is missing or not valid, 0 for a date in the past. `now` is the
    server's own time, with a time zone; without it a date is not valid.
    """
    text = (value or "").strip()
    if _DELAY_SECONDS.fullmatch(text):
        return float(text)
    date = parse_http_date(text)
    if date is None or now is None:
        return None
    return max(0.0, (date - now).total_seconds())


def _log_retry(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    seconds = state.next_action.sleep if state.next_action else 0
    log.info("Request %d failed, the next in %.0f s: %s", state.attempt_number, seconds, error)
