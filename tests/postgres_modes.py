"""States of a PostgreSQL server that tests put it into."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import create_engine


@contextmanager
def administrator(url: str) -> Iterator[Callable[[str], Any]]:
    """Yield a function that executes statements in a session that may always write."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql("SET default_transaction_read_only = off")
        yield connection.exec_driver_sql
    engine.dispose()


@contextmanager
def read_only(url: str) -> Iterator[None]:
    """Make the whole server read-only, open sessions too, as a standby after a failover is."""
    with administrator(url) as execute:
        execute("ALTER SYSTEM SET default_transaction_read_only = on")
        execute("SELECT pg_reload_conf()")
        try:
            yield
        finally:
            execute("ALTER SYSTEM RESET default_transaction_read_only")
            execute("SELECT pg_reload_conf()")
