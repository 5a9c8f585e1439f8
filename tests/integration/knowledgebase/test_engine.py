"""Connections that die while nobody uses them."""

import pytest
from sqlalchemy import text

from rag_service.database import engine
from rag_service.database.engine import autocommit, begin

pytestmark = pytest.mark.usefixtures("settings")


@pytest.mark.parametrize("use", [begin, autocommit])
def test_a_connection_that_died_at_rest_is_replaced_unseen(use, monkeypatch):
    monkeypatch.setattr(engine, "_UNUSED_SECONDS", 0.0)
    with begin() as other:
        with begin() as rested:
            pid = rested.scalar(text("SELECT pg_backend_pid()"))
        # Waits until the backend is gone.
        assert other.scalar(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": pid})
    for _ in range(2):
        with use() as connection:
            assert connection.scalar(text("SELECT pg_backend_pid()")) != pid


def test_a_statement_by_itself_is_kept_without_a_transaction():
    with autocommit() as connection:
        connection.execute(text("CREATE TABLE kept (x int)"))
    with begin() as connection:
        assert connection.scalar(text("SELECT count(*) FROM kept")) == 0
        connection.execute(text("DROP TABLE kept"))
