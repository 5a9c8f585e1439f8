"""How many connections each process may open, and whether PostgreSQL allows that many."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sqlalchemy import text

from rag_service.config.options import Settings
from rag_service.database.engine import (
    DatabaseError,
    begin,
    is_pooled_connection,
    most_connections,
)

log = logging.getLogger(__name__)

# A fork's work uses one connection at a time; the thread that renews the lease has the other.
FORK = 2
# A worker's main process: heartbeats and lost children.
MAIN_PROCESS = 1
# Rounds have one, the work that runs beside them shares the others.
MAINTENANCE = 8
_LIMITS = """
SELECT least(
    current_setting('max_connections')::int
        - current_setting('superuser_reserved_connections')::int
        - coalesce(current_setting('reserved_connections', true)::int, 0),
    nullif((SELECT rolconnlimit FROM pg_roles WHERE rolname = current_user), -1),
    nullif((SELECT datconnlimit FROM pg_database WHERE datname = current_database()), -1)
), (
    SELECT count(*) FROM pg_stat_activity
    WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
)
"""


@dataclass(frozen=True, slots=True)
class Allowed:
    """The connections that PostgreSQL allows this account, and those that are open now."""

    most: int
    in_use: int


def worker_connections(forks: int) -> int:
    """Return the most connections of a Celery worker."""
    return MAIN_PROCESS + FORK * forks


def service_connections(settings: Settings) -> dict[str, int]:
    """Return the most connections of each process of a whole service, by name."""
    return {
        "the API": most_connections(settings),
        "maintenance": MAINTENANCE,
        "the prepare worker": worker_connections(settings.prepare.worker_concurrency),
        "the ocr worker": worker_connections(settings.ocr.worker_concurrency),
    }


def shortage(needed: dict[str, int]) -> str | None:
    """Return a sentence if PostgreSQL has fewer connections left than these processes may need.

    None too if it does not answer, or if a pooler shares its connections out.
    """
    try:
        allowed = _allowed()
    except DatabaseError:
        # Health reports it.
        return None
    return None if allowed is None else shortage_of(needed, allowed)


def shortage_of(needed: dict[str, int], allowed: Allowed) -> str | None:
    """Return the sentence for these figures, or None if there are enough."""
    total = sum(needed.values())
    if total <= allowed.most - allowed.in_use:
        return None
    each = ", ".join(f"{name} {count}" for name, count in needed.items())
    return (
        f"Up to {total} database connections may be needed ({each}), and PostgreSQL allows "
        f"{allowed.most}, of which {allowed.in_use} are in use. Raise its max_connections (or the "
        "limit of the account or the database), lower OCR_WORKER_CONCURRENCY, or use PgBouncer."
    )


def warn_of_shortage(needed: dict[str, int]) -> None:
    """Log the shortage, if there is one."""
    sentence = shortage(needed)
    if sentence is not None:
        log.warning("%s", sentence)


def _allowed() -> Allowed | None:
    with begin() as connection:
        if is_pooled_connection(connection):
            return None
        return Allowed(*connection.execute(text(_LIMITS)).one())
