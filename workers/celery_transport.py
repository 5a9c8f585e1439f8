"""Celery's connection to the broker, changed so that no message and no error of it ends a worker.

A message that cannot be read is logged and dropped: a wake-up message is never needed. An error
that the broker answers is waited for, as a lost connection is.
"""

from __future__ import annotations

import contextlib
import logging
import time
from queue import Empty
from typing import Any

from celery.worker.consumer.consumer import Consumer
from celery.worker.state import maybe_shutdown
from kombu.transport.redis import Channel, Transport

log = logging.getLogger(__name__)

_SHOWN_LETTERS = 200
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 5.0
# The broker worked for this long: the next error is a new one.
_STEADY_SECONDS = 30.0
_STOP_CHECK_SECONDS = 0.2


class TolerantChannel(Channel):
    """A channel that drops what is no JSON."""

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)  # type: ignore[no-untyped-call]
        except (Empty, *self.connection.connection_errors, *self.connection.channel_errors):
            raise
        except Exception as error:
            log.error("A message that is not JSON was dropped: %s", _shown(error))
            raise Empty from error


class TolerantTransport(Transport):
    """A transport that drops messages on which Celery fails."""

    Channel = TolerantChannel

    def _deliver(self, message: Any, queue: str) -> None:
        try:
            super()._deliver(message, queue)  # type: ignore[no-untyped-call]
        except (Empty, *self.connection_errors, *self.channel_errors):
            raise
        except Exception as error:
            log.error("A message of %s was dropped: %s", queue, _shown(error))
            self._forget(message)

    def _forget(self, message: Any) -> None:
        """Acknowledge it, if it was noted as delivered, so that it does not come again."""
        # What such a message holds is anybody's guess.
        with contextlib.suppress(KeyError, TypeError, AttributeError):
            tag = message["properties"]["delivery_tag"]
            for channel in self.channels:
                if tag in channel.qos._delivered:
                    channel.basic_reject(tag, requeue=False)


class PatientConsumer(Consumer):  # type: ignore[misc]
    """A consumer that pauses before it connects again to a broker that answers with errors.

    Celery pauses only while there is no connection. Celery's setting names this class.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._pause = _FIRST_PAUSE
        self._failed_at = float("-inf")

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Pause after an error that the broker answered, then let Celery connect again."""
        if isinstance(exc, self.channel_errors):
            now = time.monotonic()
            is_new = now - self._failed_at > self._pause + _STEADY_SECONDS
            self._pause = _FIRST_PAUSE if is_new else min(2 * self._pause, _LONGEST_PAUSE)
            log.error("The broker answers with an error, next try in %.0f s: %s", self._pause, exc)
            _sleep(self._pause)
            self._failed_at = time.monotonic()
        super().on_connection_error_after_connected(exc)


def _sleep(seconds: float) -> None:
    """Sleep until the worker has to stop, if it does: then Celery's exception ends it."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        maybe_shutdown()
        time.sleep(_STOP_CHECK_SECONDS)


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_SHOWN_LETTERS]
