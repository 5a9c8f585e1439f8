"""The meaning of a database error, by its SQLSTATE: an outage that passes, or a defect.

A message for a caller says the cause in words and never holds the address of the server.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from psycopg import Error as PostgresError
from sqlalchemy.exc import (
    DBAPIError,
    InterfaceError,
    OperationalError,
    PendingRollbackError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout

from rag_service.errors import DatabaseUnavailable


@dataclass(frozen=True, slots=True)
class OutageCause:
    """Why statements fail until something outside this program changes.

    `states`: beginnings of SQLSTATEs (PostgreSQL's appendix A). `said`: the server's words when it
    refuses a connection, for which libpq reports no SQLSTATE.
    """

    states: tuple[str, ...]
    sentence: str
    said: str | None = None


_NOT_MIGRATED = OutageCause(
    ("42P01", "42703", "42704", "42883", "3F000"),
    "The database is not migrated: run `rag-service migrate`",
)
_UNREACHABLE = OutageCause(("08",), "PostgreSQL cannot be reached")
# The longest matching beginning decides.
_CAUSES = (
    _UNREACHABLE,
    _NOT_MIGRATED,
    OutageCause(("25006",), "PostgreSQL is read-only, as after a failover"),
    OutageCause(("25P",), "PostgreSQL ended a transaction that took too long"),
    OutageCause(
        ("28",),
        "PostgreSQL refuses the login; check DATABASE_URL",
        r"password authentication|no pg_hba|role .* does not exist|not permitted to log in",
    ),
    OutageCause(
        ("3D000",), "The database does not exist; check DATABASE_URL", r"database .* does not exist"
    ),
    OutageCause(("42501",), "PostgreSQL denies the account of DATABASE_URL a permission"),
    OutageCause(
        ("53300",),
        "All connections that PostgreSQL, or a pooler before it, allows are in use; raise "
        "max_connections or run fewer forks",
        r"too many|remaining connection slots|no more connections allowed",
    ),
    OutageCause(("53",), "PostgreSQL has reached a limit of its server"),
    OutageCause(("55",), "PostgreSQL could not get a lock in time"),
    OutageCause(("57014",), "PostgreSQL ended a query that took too long"),
    OutageCause(
        ("57",),
        "PostgreSQL ended the connection or the statement",
        r"the database system is|administrator command",
    ),
    OutageCause(("58", "XX"), "PostgreSQL reports a fault of its disk or its data"),
    OutageCause(("40",), "PostgreSQL undid a transaction because of a concurrent one"),
    # A prepared statement that the server or a pooler no longer knows.
    OutageCause(("0A", "26"), "PostgreSQL, or a pooler before it, refuses the statement"),
)
_CLIENT_SIDE = OutageCause((), "All connections of this process are in use")
# A connection with such an error is bound to a server, or to statements, of the past. So are the
# other connections of the pool.
_STALE = ("08", "25006", "57P", "0A", "26")
# `connection to server at "10.0.0.5", port 5432 failed: FATAL:  sorry, too many clients already`
_REFUSED = re.compile(r"connection to server (?:at|on socket) .*? failed: (?:FATAL:\s*)?([^\n]+)")
# Other words of libpq and psycopg may contain the server's address.
_LOST = re.compile(
    r"server closed the connection[^\n]*|SSL [^\n]*error: [^\n]+|the connection is \w+"
    r"|(?:connection )?timeout expired|could not (?:receive|send) data [^\n]+"
)


def is_outage(error: SQLAlchemyError) -> bool:
    """Return whether the same statement may succeed later, with nothing changed in this program."""
    return outage_cause(error) is not None


def outage_cause(error: SQLAlchemyError) -> OutageCause | None:
    """Return the cause of an outage, or None for a defect of the statement or its values."""
    if isinstance(error, PoolTimeout):
        return _CLIENT_SIDE
    state = sqlstate(error)
    if state is None:
        return _cause_without_state(error)
    matching = [
        (len(beginning), cause)
        for cause in _CAUSES
        for beginning in cause.states
        if state.startswith(beginning)
    ]
    return max(matching, key=lambda found: found[0])[1] if matching else None


def _cause_without_state(error: SQLAlchemyError) -> OutageCause | None:
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    if not (lost or isinstance(error, InterfaceError | OperationalError | PendingRollbackError)):
        return None
    reason = reason_of(error)
    said = (cause for cause in _CAUSES if cause.said and re.search(cause.said, reason))
    return next(said, _UNREACHABLE)


def sqlstate(error: SQLAlchemyError) -> str | None:
    """Return the five characters, or None if PostgreSQL did not answer."""
    cause = error.orig if isinstance(error, DBAPIError) else None
    return cause.sqlstate if isinstance(cause, PostgresError) else None


def leaves_stale_connections(error: BaseException | None) -> bool:
    """Return whether all connections of the pool should be replaced after this driver error."""
    state = error.sqlstate if isinstance(error, PostgresError) else None
    return state is not None and state.startswith(_STALE)


def error_summary(error: SQLAlchemyError) -> str:
    """Return the first line of the driver's message, for logs: no statement, no parameters."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return str(cause).strip().partition("\n")[0]


def reason_of(error: SQLAlchemyError) -> str:
    """Return the server's or libpq's reason as one line without an address, or an empty one."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(cause, PostgresError) and cause.diag.message_primary:
        return cause.diag.message_primary
    # Of several hosts, the last one that was tried.
    found = _REFUSED.findall(str(cause)) or _LOST.findall(str(cause))
    return str(found[-1]).strip() if found else ""


def as_unavailable(error: SQLAlchemyError) -> DatabaseUnavailable | None:
    """Return the error that a caller is given; None for an error that is not an outage."""
    cause = outage_cause(error)
    if cause is None:
        return None
    if cause is _NOT_MIGRATED or cause is _CLIENT_SIDE:
        return DatabaseUnavailable(f"{cause.sentence}.")
    reason = reason_of(error).rstrip(".")
    return DatabaseUnavailable(f"{cause.sentence}{': ' if reason else ''}{reason}.")
