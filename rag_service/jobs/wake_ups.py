"""Wake-up messages: Celery messages that make a worker look for a run to claim.

A lost message loses nothing and a spare one does nothing: a worker claims the first run in the
database's order, whatever the message names. Therefore sending never raises.
"""

from __future__ import annotations

import logging
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any

from rag_service.config.loader import get_settings
from rag_service.config.options import Settings
from rag_service.errors import ConfigurationError
from rag_service.states import Stage

if TYPE_CHECKING:
    from celery import Celery

log = logging.getLogger(__name__)

# What Flower and the logs call the two kinds of work.
TASK_NAMES = {Stage.PREPARE: "prepare document", Stage.OCR: "read pages"}
_CONNECT_SECONDS = 2.0
_NO_QUEUE = "rag_service:no queue"
_SCHEMES = ("redis://", "rediss://")
_import_lock = Lock()


def broker_url(settings: Settings) -> str:
    """Return the broker's URL. Raise ConfigurationError if none is set or it is no Redis URL."""
    if settings.redis.url is None:
        raise ConfigurationError(
            "redis.url is not set: set REDIS_URL, or use `rag-service up` or "
            "`rag-service run`, which start their own broker."
        )
    url = settings.redis.url.get_secret_value()
    if not url.startswith(_SCHEMES):
        scheme, mark, _ = url.partition("://")
        raise ConfigurationError(
            f"redis.url: {scheme + mark if mark else 'the value'} is not redis:// or rediss:// "
            "(REDIS_URL); Valkey uses the same schemes."
        )
    return url


def make_app(settings: Settings) -> Celery:
    """Return a Celery application with the settings that senders and workers share."""
    from celery import Celery

    app = Celery("rag_service", broker=broker_url(settings))
    app.conf.update(
        task_serializer="json",
        accept_content=["json"],
        result_serializer="json",
        task_ignore_result=True,
        task_default_queue=Stage.PREPARE,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options=_transport_options(settings),
    )
    return app


def _transport_options(settings: Settings) -> dict[str, Any]:
    return {
        "visibility_timeout": settings.redis.visibility_timeout,
        # Sweep for unacknowledged messages every 10 s instead of every 100.
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 10,
        "socket_connect_timeout": _CONNECT_SECONDS,
        "socket_keepalive": True,
        "health_check_interval": 10,
    }


@cache
def _sender() -> Celery:
    """Return the application for sending; it does not wait for an unreachable broker."""
    # Celery's package replaces itself during its import: a second thread would see half of it.
    with _import_lock:
        app = make_app(get_settings())
    app.conf.broker_transport_options |= {"max_retries": 0, "socket_timeout": _CONNECT_SECONDS}
    return app


def notify(stage: Stage, run_id: str, filename: str) -> bool:
    """Send a wake-up message to the stage's queue. Return False if the broker is unreachable."""
    try:
        _sender().send_task(
            TASK_NAMES[stage],
            kwargs={"run_id": run_id},
            queue=stage.value,
            kwargsrepr=f"{filename} (run {run_id[:8]})",
            argsrepr="",
            retry=False,
            ignore_result=True,
        )
    except _broker_errors() as error:
        log.warning(
            "Cannot reach the broker (%s); maintenance will send the wake-up message later.", error
        )
        return False
    return True


def queue_length(stage: Stage) -> int | None:
    """Return the number of undelivered messages, or None if the broker is unreachable."""
    try:
        with _sender().connection_for_write() as connection:
            return int(connection.default_channel.client.llen(stage.value))
    except _broker_errors() as error:
        log.warning("Cannot reach the broker: %s", error)
        return None


def ping(settings: Settings) -> str | None:
    """Return None if the broker can take wake-up messages, else the reason why it cannot."""
    import redis

    client = redis.Redis.from_url(
        broker_url(settings),
        socket_connect_timeout=_CONNECT_SECONDS,
        socket_timeout=_CONNECT_SECONDS,
    )
    try:
        # A write that changes nothing: there is no such list to append to. A broker that is
        # read-only, full or cannot save refuses it as it would refuse a message.
        client.rpushx(_NO_QUEUE, "")
        for stage in Stage:
            client.llen(stage.value)
    except redis.RedisError as error:
        return str(error)
    finally:
        client.close()
    return None


@cache
def _broker_errors() -> tuple[type[Exception], ...]:
    from kombu.exceptions import OperationalError
    from redis import RedisError

    return (OperationalError, RedisError, OSError)
