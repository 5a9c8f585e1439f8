"""Container health checks: `python -m workers.health_check api|prepare|ocr|maintenance|flower`.

A worker is healthy while its main process beats in the database, which it stops to do when it
hangs; a process that merely exists is not. Exit status 0 or 1.
"""

from __future__ import annotations

import socket
import sys
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta

from rag_service.config.loader import get_settings
from rag_service.config.options import Settings
from rag_service.database.engine import begin
from rag_service.jobs import live_workers
from rag_service.states import Stage

# Three times the time that a holder of maintenance may be silent.
_MAINTENANCE_SILENCE = timedelta(seconds=90)
_SECONDS = 5.0


def main() -> int:
    """Print what is wrong, if anything."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    problem = _problem(name, get_settings())
    if problem:
        print(problem, file=sys.stderr)
    return 1 if problem else 0


def _problem(name: str, settings: Settings) -> str | None:
    if name in {"api", "flower"}:
        port = settings.api.port if name == "api" else settings.flower.port
        path = "/health/live" if name == "api" else "/healthcheck"
        return _not_answering(f"http://127.0.0.1:{port}{path}")
    if name == "maintenance":
        return _maintenance_silent()
    if name in set(Stage):
        host = socket.gethostname()
        beating = [load for load in live_workers.of_stage(Stage(name)) if f"@{host}:" in load.id]
        return None if beating else f"no {name} worker of {host} beats"
    return "usage: python -m workers.health_check api|prepare|ocr|maintenance|flower"


def _not_answering(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS):
            return None
    except (urllib.error.URLError, OSError) as error:
        return f"{url}: {error}"


def _maintenance_silent() -> str | None:
    """Any holder will do: others stand by."""
    with begin() as connection:
        seen = live_workers.maintenance_seen_at(connection)
    if seen is None or datetime.now(UTC) - seen > _MAINTENANCE_SILENCE:
        return f"maintenance was last seen {seen or 'never'}"
    return None


if __name__ == "__main__":
    sys.exit(main())
