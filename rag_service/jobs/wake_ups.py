"""The doorbell: how runs are announced to workers. Used by intake, workers and maintenance.

Losing every message loses nothing and a spare one does nothing, because a worker claims the
best run from the database whatever the message names. So ringing never raises.
"""

from __future__ import annotations

import logging
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any

from rag_service.config.loader import Settings, get_settings
from rag_service.errors import ConfigurationError
from rag_service.states import Stage

if TYPE_CHECKING:
    from celery import Celery

log = logging.getLogger(__name__)

# What Flower and the logs call the two kinds of work.
TASK_NAMES = {Stage.PREPARE: "prepare document", Stage.OCR: "read pages"}
_CONNECT_SECONDS = 2.0
_SCHEMES = ("redis://", "rediss://")
_making = Lock()


def broker_url(settings: Settings) -> str:
    """The broker's URL; ConfigurationError where none is set or it is no Redis URL."""
    if settings.redis.url is None:
        raise ConfigurationError(
            "redis.url is not set: set REDIS_URL, or use `rag-service up` or "
            "`rag-service run`, which start a broker of their own."
        )
    url = settings.redis.url.get_secret_value()
    if not url.startswith(_SCHEMES):
        scheme, mark, _ = url.partition("://")
        raise ConfigurationError(
            f"redis.url: {scheme + mark if mark else 'this'} is not redis:// or rediss:// "
            "(REDIS_URL); Valkey has the same."
        )
    return url


def make_app(settings: Settings) -> Celery:
    """A Celery application with what senders and workers must agree on."""
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
    """Senders do not wait for a broker that is away or deaf; consumers have all day."""
    # Celery's package replaces itself while it is imported: a second thread would see half of it.
    with _making:
        app = make_app(get_settings())
    app.conf.broker_transport_options |= {"max_retries": 0, "socket_timeout": _CONNECT_SECONDS}
    return app


def notify(stage: Stage, run_id: str, filename: str) -> bool:
    """Put a doorbell into the stage's queue; False, and a log line, where the broker is away."""
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
        log.warning("The broker is away, the doorbell rings later: %s", error)
        return False
    return True


def queue_length(stage: Stage) -> int | None:
    """Doorbells that nobody has taken yet; None, and a log line, where the broker is away."""
    try:
        with _sender().connection_for_write() as connection:
            return int(connection.default_channel.client.llen(stage.value))
    except _broker_errors() as error:
        log.warning("The broker is away: %s", error)
        return None


def ping(settings: Settings) -> str | None:
    """None where the broker answers, else why it does not."""
    import redis

    client = redis.Redis.from_url(
        broker_url(settings),
        socket_connect_timeout=_CONNECT_SECONDS,
        socket_timeout=_CONNECT_SECONDS,
    )
    try:
        client.ping()
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
