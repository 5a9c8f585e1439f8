"""The meaning of each class of SQLSTATE, and the words that a caller is given."""

from typing import Any

import psycopg
import pytest
from psycopg import errors as pg
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.exc import OperationalError as WrappedOperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from rag_service.database.outages import as_unavailable, is_outage, leaves_stale_connections

PASSING = (
    "08000", "08006", "08P01", "0A000", "25006", "25P03", "25P04", "26000", "28000", "28P01",
    "3D000", "3F000", "40001", "40P01", "42501", "42703", "42P01", "42883", "53000", "53100",
    "53200", "53300", "53400", "55006", "55P03", "57014", "57P01", "57P02", "57P03", "57P04",
    "57P05", "58000", "58030", "58P01", "XX000", "XX001", "XX002",
)  # fmt: skip
LASTING = ("22001", "22003", "22021", "23502", "23505", "23514", "42601", "54000", "P0001")


def wrapped(error: psycopg.Error, **flags: Any) -> DBAPIError:
    return DBAPIError.instance("SELECT 1", {}, error, psycopg.Error, **flags)  # type: ignore[return-value]


@pytest.mark.parametrize("state", PASSING)
def test_an_outage_is_known_by_its_sqlstate(state: str) -> None:
    error = wrapped(pg.lookup(state)("no address here"))
    assert is_outage(error)
    found = as_unavailable(error)
    assert found is not None
    assert (found.code, found.retryable) == ("database_unavailable", True)


@pytest.mark.parametrize("state", LASTING)
def test_a_defect_of_a_statement_is_no_outage(state: str) -> None:
    error = wrapped(pg.lookup(state)("x"))
    assert not is_outage(error)
    assert as_unavailable(error) is None


def test_a_value_that_the_driver_refuses_is_no_outage() -> None:
    assert not is_outage(wrapped(psycopg.DataError("PostgreSQL text fields cannot contain NUL")))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("Connection refused\n\tIs the server running?", "cannot be reached: Connection refused."),
        ("FATAL:  sorry, too many clients already", "run fewer forks: sorry, too many clients"),
        ('FATAL:  password authentication failed for user "rag"', "refuses the login"),
        ('FATAL:  role "rag" is not permitted to log in', "refuses the login"),
        ('FATAL:  database "rag" does not exist', "database does not exist; check DATABASE_URL"),
        ("FATAL:  the database system is starting up", "ended the connection or the statement"),
        ("timeout expired", "cannot be reached: timeout expired."),
    ],
)
def test_a_refused_connection_is_explained_without_the_address(said: str, words: str) -> None:
    text = f'connection failed: connection to server at "10.1.2.3", port 5432 failed: {said}'
    found = as_unavailable(wrapped(psycopg.OperationalError(text)))
    assert found is not None
    assert words in found.message
    assert "10.1.2.3" not in found.message


@pytest.mark.parametrize(
    "error",
    [
        wrapped(psycopg.OperationalError("server closed the connection unexpectedly")),
        wrapped(psycopg.OperationalError("SSL SYSCALL error: EOF detected")),
        wrapped(psycopg.InterfaceError("the connection is closed")),
        wrapped(psycopg.DatabaseError("lost"), connection_invalidated=True),
        PendingRollbackError("Can't reconnect until invalid transaction is rolled back."),
        PoolTimeout("QueuePool limit of size 4 overflow 20 reached"),
        WrappedOperationalError("SELECT 1", {}, OSError("broken pipe")),
    ],
)
def test_an_error_without_a_sqlstate_is_an_outage_if_the_connection_failed(error: Any) -> None:
    assert is_outage(error)
    assert as_unavailable(error) is not None


def test_connections_to_a_read_only_server_are_replaced() -> None:
    assert leaves_stale_connections(pg.lookup("25006")("x"))
    assert leaves_stale_connections(pg.lookup("57P01")("x"))
    assert not leaves_stale_connections(pg.lookup("55P03")("x"))
    assert not leaves_stale_connections(None)
