"""Connections that die while they are unused, and single statements."""

import threading

import pytest
from sqlalchemy import text

from rag_service.database import connection_budget, engine
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


def test_postgresqls_limits_and_use_are_read(settings):
    sentence = connection_budget.shortage({"one": 10_000})
    assert "Up to 10000 database connections may be needed (one 10000)" in sentence
    assert connection_budget.shortage({"one": 1}) is None


def test_a_limited_process_keeps_a_connection_for_the_thread_that_reserved_it(
    settings, monkeypatch
):
    monkeypatch.setattr(engine, "_limit", None)
    engine.limit_connections(2)
    got = []

    def renew():
        engine.reserve_connection()
        with engine.begin() as connection:
            got.append(connection.scalar(text("SELECT 1")))

    with engine.begin():
        thread = threading.Thread(target=renew)
        thread.start()
        thread.join()
        assert got == [1]
        assert engine.get_engine().pool.size() == 1
        assert engine.get_engine().pool._max_overflow == 0
