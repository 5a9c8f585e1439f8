"""PgBouncer in transaction mode: nothing of a session is used, so nothing stays behind."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

from rag_service.database.engine import begin, get_engine, is_pooled_connection
from rag_service.documents import deletion
from rag_service.documents.storage import DocumentStore
from rag_service.errors import CorruptPdf
from rag_service.jobs import runs
from tests import simulation as sim
from tests.net import free_port
from tests.waiting import eventually

needs_pgbouncer = pytest.mark.skipif(
    shutil.which("pgbouncer") is None and "CI" not in os.environ, reason="needs pgbouncer"
)

# Fewer than the clients, so that they take turns.
_SERVER_CONNECTIONS = 3
_CONFIG = """
[databases]
tests = host={folder} port=5432 user={user}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {pool}
server_reset_query =
{account}
"""


@pytest.fixture
def pooled(database, environment, tmp_path):
    """The tests' database behind PgBouncer; yields a direct engine beside it."""
    url, port = make_url(database), free_port()
    folder = str(url.query["host"])
    owner = Path(folder).owner()
    config = tmp_path / "pgbouncer.ini"
    config.write_text(
        _CONFIG.format(
            folder=folder, user=url.username, port=port, pool=_SERVER_CONNECTIONS,
            account=f"user = {owner}" if os.geteuid() == 0 else "",
        )
    )  # fmt: skip
    config.chmod(0o644)
    program = subprocess.Popen(["pgbouncer", str(config)], stderr=subprocess.DEVNULL)
    direct = create_engine(url)
    environment(DATABASE_URL=f"postgresql://{url.username}@127.0.0.1:{port}/tests")
    try:
        eventually(can_connect)
        yield direct
    finally:
        direct.dispose()
        program.terminate()
        program.wait()


def can_connect():
    try:
        with begin() as connection:
            return connection.scalar(text("SELECT 1")) == 1
    except Exception:
        return False


def left_behind(direct):
    with direct.connect() as connection:
        locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
        return connection.scalar(text(locks))


def state_of_sessions():
    """Return what the server's connections have kept: settings, prepared statements, tables."""
    query = """
        SELECT current_setting('lock_timeout'),
               (SELECT count(*) FROM pg_prepared_statements),
               (SELECT count(*) FROM pg_class WHERE relpersistence = 't')
    """
    with get_engine().connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        return tuple(connection.execute(text(query)).one())


@needs_pgbouncer
def test_a_pooler_is_recognised_and_each_transaction_has_its_settings(pooled):
    with begin() as connection:
        assert is_pooled_connection(connection)
        names = ("lock_timeout", "idle_in_transaction_session_timeout", "TimeZone")
        found = [connection.scalar(text(f"SHOW {name}")) for name in names]
    assert found == ["30s", "45s", "UTC"]


def test_without_a_pooler_the_settings_are_the_sessions(settings):
    with begin() as connection:
        assert not is_pooled_connection(connection)
    with get_engine().connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        assert connection.scalar(text("SHOW lock_timeout")) == "30s"


@needs_pgbouncer
def test_uploads_and_claims_leave_nothing_in_the_servers_connections(
    pooled, start_api, make_pdf, settings
):
    api = start_api()
    contents = [make_pdf(f"{number}") for number in range(12)] * 4

    def upload(content):
        return api.upload(content).status_code

    with ThreadPoolExecutor(12) as pool:
        codes = list(pool.map(upload, contents))
    assert sorted(codes) == [200] * 36 + [202] * 12
    claims = [sim.claim() for _ in range(6)]
    for run in claims:
        runs.fail(run, CorruptPdf())
        assert api.client.delete(f"/documents/{run.document_id}").is_success
    assert deletion.remove_deleted(DocumentStore(settings)) == 6
    assert left_behind(pooled) == 0
    assert {state_of_sessions() for _ in range(5)} == {("0", 0, 0)}
