"""Alarm webhook: one POST of JSON for each event, in order."""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import asdict, dataclass

import httpx
from tenacity import RetryError, Retrying, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_exponential

from rag_service.config.options import NotifyOptions
from rag_service.runtime.http_client import trusted_certificates
from rag_service.runtime.retry import RETRYABLE_STATUS

log = logging.getLogger(__name__)

_SECONDS = 10.0
_TRIES = 4
# Alarms are rare: a longer queue means that the receiver does not accept them.
_MOST_WAITING = 100


@dataclass(frozen=True, slots=True)
class Event:
    """The posted JSON. `event`: `starved`, `server_out`, or one of them with `_over`.

    `since` in ISO 8601.
    """

    event: str
    server: str
    sentence: str
    since: str


class Notifier:
    """Posts events in a background thread, so that no caller waits."""

    def __init__(self, settings: NotifyOptions, *, wait: float = 5.0) -> None:
        """`wait`: seconds before the second try; it is doubled before each further try."""
        self._url = settings.webhook_url.get_secret_value() if settings.webhook_url else None
        self._wait = wait
        self._events: queue.Queue[Event] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None

    def send(self, event: Event) -> None:
        """Queue the event for posting. Do nothing if no address is set."""
        if self._url is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._post_all, name="notify", daemon=True)
            self._thread.start()
        try:
            self._events.put_nowait(event)
        except queue.Full:
            log.warning("notify.webhook_url accepts no events; dropping %s of %s", *_names(event))

    def _post_all(self) -> None:
        while True:
            self._post(self._events.get())

    def _post(self, event: Event) -> None:
        tries = Retrying(
            retry=retry_if_exception_type(_TemporaryFailure),
            stop=stop_after_attempt(_TRIES),
            wait=wait_exponential(self._wait),
        )
        try:
            tries(self._try, event)
        except (_Rejected, RetryError) as error:
            cause = error.last_attempt.exception() if isinstance(error, RetryError) else error
            # Without the address, which is a secret.
            log.warning("Cannot post %s of %s to notify.webhook_url: %s", *_names(event), cause)

    def _try(self, event: Event) -> None:
        try:
            answer = httpx.post(
                str(self._url), json=asdict(event), timeout=_SECONDS, verify=trusted_certificates()
            )
        except httpx.RequestError as error:
            raise _TemporaryFailure(type(error).__name__) from error
        if answer.status_code in RETRYABLE_STATUS or answer.is_server_error:
            raise _TemporaryFailure(f"HTTP {answer.status_code}")
        if not answer.is_success:
            raise _Rejected(f"HTTP {answer.status_code}")


class _TemporaryFailure(Exception):
    """The receiver may accept the event later."""


class _Rejected(Exception):
    """The receiver does not accept the event."""


def _names(event: Event) -> tuple[str, str]:
    return event.event, event.server
