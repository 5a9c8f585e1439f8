"""Container health checks: `python -m workers.health_check api|prepare|ocr|maintenance|flower`.

A worker is healthy while its main process sends heartbeats to the database; a process that hangs
sends none. Exit status 0 or 1.
"""

from __future__ import annotations

import socket
import sys
import urllib.error
import urllib.request

from rag_service.config.loader import get_settings
from rag_service.config.options import Settings
from rag_service.jobs import live_workers
from rag_service.states import Stage

# Three times as long as the lease of maintenance.
_MAINTENANCE_SILENCE = 90.0
_SECONDS = 5.0


def main() -> int:
    """Print the problem, if there is one, and return the exit status."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    problem = _diagnose(name, get_settings())
    if problem:
        print(problem, file=sys.stderr)
    return 1 if problem else 0


def _diagnose(name: str, settings: Settings) -> str | None:
    if name in {"api", "flower"}:
        port = settings.api.port if name == "api" else settings.flower.port
        path = "/health/live" if name == "api" else "/healthcheck"
        return _check_url(f"http://127.0.0.1:{port}{path}")
    if name == "maintenance":
        return _check_maintenance()
    if name in set(Stage):
        host = socket.gethostname()
        alive = [load for load in live_workers.of_stage(Stage(name)) if f"@{host}:" in load.id]
        return None if alive else f"no {name} worker on {host} sends heartbeats"
    return "usage: python -m workers.health_check api|prepare|ocr|maintenance|flower"


def _check_url(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS):
            return None
    except (urllib.error.URLError, OSError) as error:
        return f"{url}: {error}"


def _check_maintenance() -> str | None:
    """Check the process that holds maintenance, on whatever host: the others only wait."""
    silence = live_workers.maintenance_silence()
    if silence is None:
        return "maintenance was never seen"
    if silence > _MAINTENANCE_SILENCE:
        return f"maintenance was last seen {silence:.0f} s ago"
    return None


if __name__ == "__main__":
    sys.exit(main())
