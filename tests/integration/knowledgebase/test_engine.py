"""Connections that die while they are unused, and single statements."""

import pytest
from sqlalchemy import text

from rag_service.database import engine
from rag_service.database.engine import autocommit, begin

pytestmark = pytest.mark.usefixtures("settings")


@pytest.mark.parametrize("use", [begin, autocommit])
def test_a_connection_that_died_while_unused_is_replaced(use, monkeypatch):
    monkeypatch.setattr(engine, "_UNUSED_SECONDS", 0.0)
    with begin() as other:
        with begin() as unused:
            pid = unused.scalar(text("SELECT pg_backend_pid()"))
        # Waits until the backend is gone.
        assert other.scalar(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": pid})
    for _ in range(2):
        with use() as connection:
            assert connection.scalar(text("SELECT pg_backend_pid()")) != pid


def test_a_single_statement_is_committed_without_a_transaction():
    with autocommit() as connection:
        connection.execute(text("CREATE TABLE kept (x int)"))
    with begin() as connection:
        assert connection.scalar(text("SELECT count(*) FROM kept")) == 0
        connection.execute(text("DROP TABLE kept"))
