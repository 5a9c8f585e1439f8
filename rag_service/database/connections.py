"""Settings of a new connection, direct or through a pooler such as PgBouncer.

Through a pooler that lends a server's connection for one transaction, nothing may outlive the
transaction: settings are made in each one, and no statement is prepared. Locks that outlive a
transaction are used nowhere.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.pool import ConnectionPoolEntry

from rag_service.config.options import Settings

# The longest wait for a row that another transaction is writing to.
LOCK_SECONDS = 30.0
_IS_POOLED = "is_pooled"


def prepare_connections(engine: Engine, settings: Settings) -> None:
    """Let the engine give each new connection, or each transaction of a pooled one, its settings.

    A process that freezes inside a transaction must not lock its run's row for longer than its
    lease, because maintenance skips locked rows.
    """
    values = {
        "TimeZone": "UTC",
        "lock_timeout": f"{int(LOCK_SECONDS * 1000)}ms",
        "idle_in_transaction_session_timeout": f"{int(settings.lease.give_up_after * 1000)}ms",
    }
    of_session = "; ".join(f"SET {name} = '{value}'" for name, value in values.items())
    of_transaction = "; ".join(f"SET LOCAL {name} = '{value}'" for name, value in values.items())

    @event.listens_for(engine, "connect")
    def set_up(connection: Any, record: ConnectionPoolEntry) -> None:
        record.info[_IS_POOLED] = _has_pooler(connection)
        if record.info[_IS_POOLED]:
            connection.prepare_threshold = None
        else:
            connection.execute(of_session)
        connection.commit()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        is_single = connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"
        if is_pooled_connection(connection) and not is_single:
            connection.exec_driver_sql(of_transaction)


def is_pooled_connection(connection: Connection) -> bool:
    """Return whether a pooler answers for PostgreSQL on this connection."""
    return bool(connection.info[_IS_POOLED])


def _has_pooler(connection: Any) -> bool:
    """Return whether another process executes a statement than was named at the login."""
    found = connection.execute("SELECT pg_backend_pid()").fetchone()
    return bool(found[0] != connection.info.backend_pid)
