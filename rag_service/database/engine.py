"""One database engine per process, made on first use and never shared with a fork."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection as Connection
from sqlalchemy import Engine, ExceptionContext, create_engine, event, func, text
from sqlalchemy.exc import InvalidatePoolError
from sqlalchemy.exc import SQLAlchemyError as DatabaseError
from sqlalchemy.pool import ConnectionPoolEntry

from rag_service.config.loader import get_settings
from rag_service.config.options import Settings
from rag_service.database.connections import (
    LOCK_SECONDS,
    is_pooled_connection,
    prepare_connections,
)
from rag_service.database.outages import (
    as_unavailable,
    error_summary,
    is_outage,
    leaves_stale_connections,
)
from rag_service.errors import ConfigurationError, DatabaseUnavailable

# `Connection` and `DatabaseError` are SQLAlchemy's; other packages import them from here.
__all__ = [
    "LOCK_SECONDS",
    "Connection",
    "DatabaseError",
    "as_unavailable",
    "autocommit",
    "begin",
    "error_summary",
    "get_engine",
    "is_outage",
    "is_pooled_connection",
    "limit_connections",
    "ping",
    "reading",
    "reserve_connection",
]

# Connections that an API process may open temporarily beyond its pool.
_OVERFLOW = 20
# A connection that was unused for this long is pinged before use.
_UNUSED_SECONDS = 1.0
# The longest statement of an answer that a client waits for; Prometheus waits 10 s by default.
READ_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class Connections:
    """How many connections an engine keeps open, and how many more it opens at times."""

    kept: int
    overflow: int = 0


_engines: dict[tuple[int, str], Engine] = {}
# Set by a process of which there are many: see `limit_connections`.
_limit: Connections | None = None
_thread = threading.local()
_SHARED, _RESERVED = "shared", "reserved"


def limit_connections(most: int) -> None:
    """Limit this process and its later forks; call it before the first query.

    One of the connections is for the thread that has called `reserve_connection`.
    """
    global _limit
    _limit = Connections(max(1, most - 1))


def reserve_connection() -> None:
    """Give this thread a connection of its own, for which it never waits.

    The thread that renews a lease must not queue behind the work that the lease protects.
    """
    _thread.pool = _RESERVED


def get_engine() -> Engine:
    """Return this process's engine. A fork makes its own and does not touch its parent's."""
    key = (os.getpid(), getattr(_thread, "pool", _SHARED))
    engine = _engines.get(key)
    if engine is None:
        _drop_parent_engines(key[0])
        connections = Connections(1) if key[1] == _RESERVED else _limit
        # setdefault: two threads that come first together get the same engine.
        engine = _engines.setdefault(key, make_engine(get_settings(), connections))
    return engine


def _drop_parent_engines(pid: int) -> None:
    """Drop the engines of a parent process without closing its connections."""
    for owner in [owner for owner in _engines if owner[0] != pid]:
        _engines.pop(owner).dispose(close=False)


def database_url(settings: Settings) -> str:
    """Return the URL with the shipped driver. Raise ConfigurationError if none is set."""
    if settings.database.url is None:
        raise ConfigurationError(
            "database.url is not set: set DATABASE_URL, or use `rag-service up` or "
            "`rag-service run`, which start their own PostgreSQL."
        )
    url = settings.database.url.get_secret_value()
    scheme, _, rest = url.partition("://")
    if scheme in {"postgres", "postgresql"}:
        return f"postgresql+psycopg://{rest}"
    if scheme != "postgresql+psycopg":
        raise ConfigurationError(f"database.url: {scheme}:// is not PostgreSQL (DATABASE_URL).")
    return url


def make_engine(settings: Settings, connections: Connections | None = None) -> Engine:
    """Return a pooled engine that detects dead connections before use."""
    connections = connections or Connections(settings.database.pool_size, _OVERFLOW)
    timeout = max(1, int(settings.database.connect_timeout))
    engine = create_engine(
        database_url(settings),
        pool_size=connections.kept,
        max_overflow=connections.overflow,
        # Keep the documents' text out of logs.
        hide_parameters=True,
        connect_args={
            "connect_timeout": timeout,
            "application_name": "rag_service",
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 25_000,
        },
    )
    prepare_connections(engine, settings)
    _ping_when_unused(engine)
    _drop_stale_connections(engine)
    return engine


def _drop_stale_connections(engine: Engine) -> None:
    """Replace all connections of the pool after an error that shows that they are stale."""

    @event.listens_for(engine, "handle_error")
    def mark(context: ExceptionContext) -> None:
        if leaves_stale_connections(context.original_exception):
            context.is_disconnect = True


def _ping_when_unused(engine: Engine) -> None:
    """Ping a connection before use unless it was used within the last second."""

    @event.listens_for(engine, "checkin")
    def note(_: object, record: ConnectionPoolEntry) -> None:
        record.info["used"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def ping(connection: Any, record: ConnectionPoolEntry, _: object) -> None:
        now = time.monotonic()
        if now - record.info.get("used", now) < _UNUSED_SECONDS:
            return
        try:
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            raise InvalidatePoolError() from error


def most_connections(settings: Settings) -> int:
    """Return the most connections of a process that has not limited them."""
    return settings.database.pool_size + _OVERFLOW


@contextmanager
def autocommit() -> Iterator[Connection]:
    """Yield a connection for a single statement, which needs no transaction."""
    with get_engine().connect() as connection:
        yield connection.execution_options(isolation_level="AUTOCOMMIT")


@contextmanager
def begin() -> Iterator[Connection]:
    """Yield a connection inside a transaction."""
    with get_engine().begin() as connection:
        yield connection


@contextmanager
def reading() -> Iterator[Connection]:
    """Yield a connection inside a transaction whose statements may each take READ_SECONDS.

    For answers that a client waits for: PostgreSQL ends the statement after its client has left.
    """
    with get_engine().begin() as connection:
        limit = f"{int(READ_SECONDS * 1000)}ms"
        connection.execute(func.set_config("statement_timeout", limit, True).select())
        yield connection


def ping() -> None:
    """Raise DatabaseUnavailable if PostgreSQL does not answer or cannot be written to."""
    try:
        with get_engine().connect() as connection:
            read_only = connection.scalar(text("SELECT current_setting('transaction_read_only')"))
    except DatabaseError as error:
        raise (as_unavailable(error) or DatabaseUnavailable(error_summary(error))) from error
    if read_only == "on":
        # After a failover, new connections may reach the new primary server.
        get_engine().dispose()
        raise DatabaseUnavailable("PostgreSQL is read-only, as after a failover.")
