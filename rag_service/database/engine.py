"""One database engine a process, made on first use and never carried over a fork."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from psycopg import Error as PostgresError
from psycopg.errors import UndefinedColumn, UndefinedTable
from sqlalchemy import Connection as Connection
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError, InterfaceError, InvalidatePoolError, OperationalError
from sqlalchemy.exc import SQLAlchemyError as DatabaseError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import ConnectionPoolEntry

from rag_service.config.loader import Settings, get_settings
from rag_service.errors import ConfigurationError, ServiceUnreachable

# The names of SQLAlchemy that the rest of the project may know.
__all__ = [
    "Connection",
    "DatabaseError",
    "begin",
    "get_engine",
    "is_outage",
    "is_unmigrated",
    "ping",
    "refusal",
    "single",
    "trouble",
]

_engines: dict[int, Engine] = {}
# Connections that a process may open for a while beyond its pool.
_OVERFLOW = 20
# A connection that rested this long is asked whether it lives before it is used.
_REST_SECONDS = 1.0
# The longest wait for a row that another transaction is writing to.
LOCK_SECONDS = 30.0


def get_engine() -> Engine:
    """This process's engine; a fork gets its own, its parent's is left alone."""
    pid = os.getpid()
    engine = _engines.get(pid)
    if engine is None:
        _forget_parents(pid)
        # Of two threads that come first together, both get the same engine.
        engine = _engines.setdefault(pid, make_engine(get_settings()))
    return engine


def _forget_parents(pid: int) -> None:
    """A parent's connections are not ours to close: forget them without a goodbye."""
    for owner in [owner for owner in _engines if owner != pid]:
        _engines.pop(owner).dispose(close=False)


def database_url(settings: Settings) -> str:
    """The URL with the driver we ship; ConfigurationError where none is set."""
    if settings.database.url is None:
        raise ConfigurationError(
            "database.url is not set: set DATABASE_URL, or use `rag-service up` or "
            "`rag-service run`, which start a PostgreSQL of their own."
        )
    url = settings.database.url.get_secret_value()
    scheme, _, rest = url.partition("://")
    if scheme in {"postgres", "postgresql"}:
        return f"postgresql+psycopg://{rest}"
    if scheme != "postgresql+psycopg":
        raise ConfigurationError(f"database.url: {scheme}:// is not PostgreSQL (DATABASE_URL).")
    return url


def make_engine(settings: Settings) -> Engine:
    """A pooled engine whose dead connections are noticed before use."""
    timeout = max(1, int(settings.database.connect_timeout))
    # A process that freezes inside a transaction must not keep its run's row locked for longer
    # than its lease: maintenance passes by rows that somebody writes to.
    limits = {
        "lock_timeout": LOCK_SECONDS,
        "idle_in_transaction_session_timeout": settings.lease.give_up_after,
    }
    options = [f"-c {name}={int(seconds * 1000)}ms" for name, seconds in limits.items()]
    engine = create_engine(
        database_url(settings),
        pool_size=settings.database.pool_size,
        max_overflow=_OVERFLOW,
        # Documents' text does not belong in logs.
        hide_parameters=True,
        connect_args={
            "connect_timeout": timeout,
            "application_name": "rag_service",
            "options": " ".join(["-c timezone=UTC", *options]),
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 25_000,
        },
    )
    _ping_after_rest(engine)
    return engine


def _ping_after_rest(engine: Engine) -> None:
    """Ping a connection before use, unless it was used a moment ago: a run makes many calls."""

    @event.listens_for(engine, "checkin")
    def note(_: object, record: ConnectionPoolEntry) -> None:
        record.info["used"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def ping(connection: Any, record: ConnectionPoolEntry, _: object) -> None:
        now = time.monotonic()
        if now - record.info.get("used", now) < _REST_SECONDS:
            return
        try:
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            raise InvalidatePoolError() from error


def most_connections(settings: Settings) -> int:
    """How many threads of a process can use the database at the same time."""
    return settings.database.pool_size + _OVERFLOW


@contextmanager
def single() -> Iterator[Connection]:
    """For one statement by itself, which needs no transaction around it."""
    with get_engine().connect() as connection:
        yield connection.execution_options(isolation_level="AUTOCOMMIT")


@contextmanager
def begin() -> Iterator[Connection]:
    """A transaction on this process's engine."""
    with get_engine().begin() as connection:
        yield connection


def is_outage(error: DatabaseError) -> bool:
    """Whether PostgreSQL was away or had no connection free: the same call may succeed later."""
    if isinstance(error, InterfaceError | OperationalError | PoolTimeout):
        return True
    return isinstance(error, DBAPIError) and error.connection_invalidated


def trouble(error: DatabaseError) -> str:
    """The driver's own first line, for logs: the cause without the statement that met it."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return str(cause).strip().partition("\n")[0]


def refusal(error: DatabaseError) -> str | None:
    """PostgreSQL's own sentence, like `No space left on device`; None where it did not answer."""
    cause = error.orig if isinstance(error, DBAPIError) else None
    return cause.diag.message_primary if isinstance(cause, PostgresError) else None


def is_unmigrated(error: DatabaseError) -> bool:
    """Whether the statement failed because tables are missing or of another version."""
    return isinstance(error, DBAPIError) and isinstance(
        error.orig, UndefinedTable | UndefinedColumn
    )


def ping() -> None:
    """Raise ServiceUnreachable where PostgreSQL does not answer."""
    try:
        with get_engine().connect() as connection:
            connection.execute(text("SELECT 1"))
    except OperationalError as error:
        raise ServiceUnreachable(f"PostgreSQL does not answer: {error.orig}") from error
