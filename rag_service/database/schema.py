"""Brings the database to this version's tables. Used by migrate, up and tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from rag_service.database.engine import get_engine
from rag_service.errors import ConfigurationError

# Any constant: two `migrate` at once wait for each other on it.
_MIGRATION_LOCK = 7_361_001


def _config() -> Config:
    spec = importlib.util.find_spec("migrations")
    if spec is None or spec.origin is None:
        raise ConfigurationError("The package `migrations` is not installed.")
    config = Config()
    config.set_main_option("script_location", str(Path(spec.origin).parent).replace("%", "%%"))
    return config


def migrate() -> str:
    """Upgrade to the newest revision; safe to run from several places. Returns the revision."""
    config = _config()
    with get_engine().connect() as connection:
        # A migration may take longer than our limit on waits for locks.
        connection.execute(text("SET LOCAL lock_timeout = 0"))
        connection.execute(text(f"SELECT pg_advisory_lock({_MIGRATION_LOCK})"))
        connection.commit()
        try:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            connection.commit()
        finally:
            connection.rollback()
            connection.execute(text(f"SELECT pg_advisory_unlock({_MIGRATION_LOCK})"))
            connection.commit()
    return newest_revision()


def newest_revision() -> str:
    """The revision this version of rag_service needs."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    if head is None:
        raise ConfigurationError("The package `migrations` holds no migration.")
    return head


def current_revision() -> str | None:
    """The revision the database has, or None where it was never migrated."""
    with get_engine().connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def require_migrated() -> None:
    """Raise ConfigurationError where the tables are not this version's."""
    found, needed = current_revision(), newest_revision()
    if found != needed:
        raise ConfigurationError(
            f"The database is at revision {found or 'none'}, this version needs {needed}: "
            "run `rag-service migrate`."
        )
