"""Tells of alarms elsewhere: one POST of JSON each, in their order. Used by maintenance."""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import asdict, dataclass

import httpx
from tenacity import RetryError, Retrying, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_exponential

from rag_service.config.options import NotifyOptions
from rag_service.runtime.certificates import trusted
from rag_service.runtime.retry import RETRYABLE_STATUS

log = logging.getLogger(__name__)

_SECONDS = 10.0
_TRIES = 4
# Alarms are rare: more than so many mean that nobody takes them.
_MOST_WAITING = 100


@dataclass(frozen=True, slots=True)
class Event:
    """What is posted: `starved` or `starved_over`; `since` in ISO 8601."""

    event: str
    server: str
    sentence: str
    since: str


class Notifier:
    """Posts events from a thread of its own, so that nobody waits for it."""

    def __init__(self, settings: NotifyOptions, *, wait: float = 5.0) -> None:
        """`wait`: seconds before the second try; each wait is twice the one before."""
        self._url = settings.webhook_url.get_secret_value() if settings.webhook_url else None
        self._wait = wait
        self._events: queue.Queue[Event] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None

    def tell(self, event: Event) -> None:
        """Post the event soon; nothing where no address is set."""
        if self._url is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._post_all, name="notify", daemon=True)
            self._thread.start()
        try:
            self._events.put_nowait(event)
        except queue.Full:
            log.warning("notify.webhook_url takes nothing: %s of %s is dropped", *_names(event))

    def _post_all(self) -> None:
        while True:
            self._post(self._events.get())

    def _post(self, event: Event) -> None:
        tries = Retrying(
            retry=retry_if_exception_type(_TryAgain),
            stop=stop_after_attempt(_TRIES),
            wait=wait_exponential(self._wait),
        )
        try:
            tries(self._try, event)
        except (_Refused, RetryError) as error:
            cause = error.last_attempt.exception() if isinstance(error, RetryError) else error
            # Never the address: it is a secret.
            log.warning("notify.webhook_url was not told %s of %s: %s", *_names(event), cause)

    def _try(self, event: Event) -> None:
        try:
            answer = httpx.post(
                str(self._url), json=asdict(event), timeout=_SECONDS, verify=trusted()
            )
        except httpx.RequestError as error:
            raise _TryAgain(type(error).__name__) from error
        if answer.status_code in RETRYABLE_STATUS or answer.is_server_error:
            raise _TryAgain(f"HTTP {answer.status_code}")
        if not answer.is_success:
            raise _Refused(f"HTTP {answer.status_code}")


class _TryAgain(Exception):
    """The receiver may take it later."""


class _Refused(Exception):
    """The receiver does not take it."""


def _names(event: Event) -> tuple[str, str]:
    return event.event, event.server
