"""Migration of the database to this version's tables."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from rag_service.database.engine import begin, get_engine
from rag_service.errors import ConfigurationError

# Advisory lock key, an arbitrary constant: concurrent `migrate` commands wait for each other.
_MIGRATION_LOCK = 7_361_001


def _config() -> Config:
    spec = importlib.util.find_spec("migrations")
    if spec is None or spec.origin is None:
        raise ConfigurationError("The package `migrations` is not installed.")
    config = Config()
    config.set_main_option("script_location", str(Path(spec.origin).parent).replace("%", "%%"))
    return config


def migrate() -> str:
    """Upgrade to the newest revision; concurrent calls are safe. Return the revision.

    Raises ConfigurationError if the database is newer than this program.
    """
    config = _config()
    _require_known(current_revision())
    # The lock has a connection of its own: Alembic ends the transactions of the other one.
    with begin() as owner, get_engine().connect() as connection:
        owner.execute(text("SET LOCAL lock_timeout = 0"))
        owner.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
        owner.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})"))
        # A migration may wait for locks longer than LOCK_SECONDS.
        connection.execute(text("SET LOCAL lock_timeout = 0"))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        connection.commit()
    return newest_revision()


def newest_revision() -> str:
    """Return the revision that this version of rag_service needs."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    if head is None:
        raise ConfigurationError("The package `migrations` contains no migration.")
    return head


def current_revision() -> str | None:
    """Return the database's revision, or None if it was never migrated."""
    with get_engine().connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def require_migrated() -> None:
    """Raise ConfigurationError if the tables are not this version's."""
    found, needed = current_revision(), newest_revision()
    _require_known(found)
    if found != needed:
        raise ConfigurationError(
            f"The database is at revision {found or 'none'}, this version needs {needed}: "
            "run `rag-service migrate`."
        )


def _require_known(revision: str | None) -> None:
    """Raise ConfigurationError if this program does not have the migration of the revision."""
    known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
    if revision is not None and revision not in known:
        raise ConfigurationError(
            f"The database is at revision {revision}, which is newer than this program (it knows "
            f"revisions up to {newest_revision()}). Install the version that migrated it."
        )
