"""The one retry schedule for page requests to another service; clients raise TryAgain into it.

What is worth another request: no connection, a time-out, 502, 503, 504, and 429 by its Retry-After.
Anything else must not be raised as TryAgain, and ends the schedule at once.
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
# A server may not hold a page longer than this by asking for it.
LONGEST_RETRY_AFTER = 600.0
# "Retry-After: 0" would spend the whole budget at once.
SHORTEST_RETRY_AFTER = 1.0

_DELAY_SECONDS = re.compile(r"[0-9]+(\.[0-9]+)?")


class TryAgain(Exception):
    """The request failed in a way that passes; `retry_after` is the server's own wish in seconds.

    It comes out of the schedule itself once the last request has failed too.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def page_schedule(
    settings: RetryOptions, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> AsyncRetrying:
    """A fresh schedule for one page: len(settings.waits) + 1 requests at most.

    Use as `async for attempt in page_schedule(...): with attempt: ...` or call it with the
    function and its arguments. Raises the last TryAgain, and any other exception at once.
    """

    def wait(state: RetryCallState) -> float:
        # tenacity asks for a wait before it asks whether to stop.
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
        before_sleep=_say_why,
        reraise=True,
    )


def wait_before(attempt: int, settings: RetryOptions, retry_after: float | None) -> float:
    """Seconds between the failed request `attempt` (from 1) and the next.

    The schedule's wait spread by ±jitter, or the server's wish spread upwards only.
    """
    planned = settings.waits[attempt - 1]
    if retry_after is None:
        return planned * random.uniform(1 - settings.jitter, 1 + settings.jitter)
    floor = min(planned, SHORTEST_RETRY_AFTER)
    asked = min(max(retry_after, floor), LONGEST_RETRY_AFTER)
    return asked * random.uniform(1, 1 + settings.jitter)


def parse_retry_after(value: str | None, now: datetime) -> float | None:
    """Seconds that a Retry-After header asks for (RFC 9110, 10.2.3: a number or a date).

    None where there is no header or nothing that can be read; a date in the past is 0.
    `now` is aware.
    """
    text = (value or "").strip()
    if _DELAY_SECONDS.fullmatch(text):
        return float(text)
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - now).total_seconds())


def _say_why(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    seconds = state.next_action.sleep if state.next_action else 0
    log.info("Request %d failed, the next in %.0f s: %s", state.attempt_number, seconds, error)
