"""One database engine a process, made on first use and never carried over a fork."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from psycopg.errors import UndefinedColumn, UndefinedTable
from sqlalchemy import Connection as Connection
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import SQLAlchemyError as DatabaseError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from rag_service.errors import ConfigurationError, ServiceUnreachable
from rag_service.settings import Settings, get_settings

# The names of SQLAlchemy that the rest of the project may know.
__all__ = [
    "Connection",
    "DatabaseError",
    "begin",
    "get_engine",
    "is_outage",
    "is_unmigrated",
    "ping",
]

_engines: dict[int, Engine] = {}
# Connections that a process may open for a while beyond its pool.
_OVERFLOW = 20
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
        "idle_in_transaction_session_timeout": settings.lease.renew_every,
    }
    options = [f"-c {name}={int(seconds * 1000)}ms" for name, seconds in limits.items()]
    return create_engine(
        database_url(settings),
        pool_size=settings.database.pool_size,
        max_overflow=_OVERFLOW,
        pool_pre_ping=True,
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


def most_connections(settings: Settings) -> int:
    """How many threads of a process can use the database at the same time."""
    return settings.database.pool_size + _OVERFLOW


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
