"""The migrations make the same tables as the models."""

import re
import subprocess
import sys
import threading
import uuid
from dataclasses import replace

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import NullPool, create_engine, make_url, text

from rag_service.database import schema
from rag_service.database.engine import get_engine
from rag_service.database.models import Base
from rag_service.errors import ConfigurationError
from rag_service.jobs import run_pages
from rag_service.states import LayoutMode
from tests import simulation as sim

MIGRATE = "from rag_service.database.schema import migrate; print(migrate())"


@pytest.fixture(autouse=True)
def empty_database(database, environment):
    """A separate database, because these tests drop the tables."""
    name = f"schema_{uuid.uuid4().hex}"
    admin = create_engine(database, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    environment(DATABASE_URL=make_url(database).set(database=name).render_as_string(False))
    yield name
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))


def move(to, revision):
    config = schema._config()
    with get_engine().connect() as connection:
        config.attributes["connection"] = connection
        to(config, revision)
        connection.commit()


def downgrade():
    move(command.downgrade, "base")


def tables():
    query = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
    return {row.tablename for row in sim.rows(query)}


def partial_indexes():
    query = "SELECT indexname, indexdef FROM pg_indexes WHERE indexdef LIKE '% WHERE %'"
    return {row.indexname: row.indexdef for row in sim.rows(query)}


def test_the_migrations_and_the_models_agree():
    schema.migrate()
    with get_engine().connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_partial_indexes_have_the_models_conditions():
    """Alembic does not compare the condition of a partial index."""
    schema.migrate()
    migrated = partial_indexes()
    downgrade()
    Base.metadata.create_all(get_engine())
    assert partial_indexes() == migrated
    assert "uq_runs_active" in migrated


def test_upgrade_downgrade_and_upgrade_again():
    with pytest.raises(ConfigurationError, match=re.escape("run `rag-service migrate`")):
        schema.require_migrated()
    assert schema.migrate() == schema.newest_revision()
    assert set(Base.metadata.tables) < tables()
    schema.require_migrated()
    downgrade()
    assert tables() == {"alembic_version"}
    assert schema.current_revision() is None
    schema.migrate()
    schema.require_migrated()


@pytest.mark.parametrize("use", [schema.migrate, schema.require_migrated])
def test_a_database_of_a_newer_program_is_named_as_such(use):
    schema.migrate()
    with get_engine().begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0099'"))
    with pytest.raises(ConfigurationError, match="0099, which is newer than this program"):
        use()
    with get_engine().begin() as connection:
        newest = {"newest": schema.newest_revision()}
        connection.execute(text("UPDATE alembic_version SET version_num = :newest"), newest)


def test_migrating_a_current_database_changes_nothing():
    schema.migrate()
    document_id = sim.add_document()
    assert schema.migrate() == schema.current_revision()
    assert sim.document_row(document_id).filename == "a.pdf"


def test_concurrent_migrations_wait_for_each_other():
    started = [
        subprocess.Popen([sys.executable, "-c", MIGRATE], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=100)[0].strip() for process in started]
    assert answers == [schema.newest_revision()] * 2


def test_a_migration_waits_for_another_longer_than_the_lock_timeout(monkeypatch):
    done = []
    thread = threading.Thread(target=lambda: done.append(schema.migrate()))
    monkeypatch.setattr("rag_service.database.connections.LOCK_SECONDS", 0.1)
    with get_engine().connect() as connection:
        assert connection.scalar(text("SHOW lock_timeout")) == "100ms"
        connection.execute(text(f"SELECT pg_advisory_lock({schema._MIGRATION_LOCK})"))
        thread.start()
        sim.wait_until_blocked()
        connection.execute(text("SELECT pg_sleep(0.3)"))
        assert done == []
        connection.execute(text(f"SELECT pg_advisory_unlock({schema._MIGRATION_LOCK})"))
    thread.join()
    assert done == [schema.newest_revision()]


OLD_RUN = """
INSERT INTO runs (id, document_id, number, state, parser, model, ocr, dpi, fingerprint, priority,
                  reuse_pages, epoch, crashes, expiries, worked_seconds, warnings)
VALUES ('r', :document, 1, 'processed', 'glmocr', 'glm-ocr', 'auto', 150, 'before', 1,
        true, 1, 0, 0, 0, '[]')
"""
OLD_PAGE = """
INSERT INTO pages (run_id, number, plan, plan_reason, state, width_pt, height_pt, markdown,
                   fingerprint, reused, tries, warnings)
VALUES ('r', 1, 'ocr', '', 'ocr', 595, 842, 'text', 'before', false, 0, '[]')
"""


def test_pages_from_before_regions_existed_are_still_reused():
    move(command.upgrade, "0002")
    document_id = sim.insert_document()
    sim.execute(OLD_RUN, document=document_id)
    sim.execute(OLD_PAGE)
    schema.migrate()
    assert sim.page_row("r", 1).regions == []
    assert sim.run_row("r").layout == "page"
    sim.add_run(document_id, replace(sim.OPTIONS, layout=LayoutMode.PAGE))
    assert run_pages.reuse(sim.claim()) == 1
    move(command.downgrade, "0002")
    assert {row.fingerprint for row in sim.rows("SELECT fingerprint FROM runs")} != {"before"}
