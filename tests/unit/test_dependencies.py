"""What a user's installation imports is what it declares: development tools must hide no gap."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import distribution, packages_distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

IMPORT_EVERYTHING = """
import json, pkgutil, sys

before = set(sys.modules)
import kombu.transport.redis, uvicorn.loops.auto, sqlalchemy.dialects.postgresql.psycopg
import rag_service, workers
for package in (rag_service, workers):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.startswith(("rag_service.pdf.child", "workers.runpod_handler")):
            __import__(module.name)
json.dump(sorted({name.partition(".")[0] for name in set(sys.modules) - before}), sys.stdout)
"""


def _declared(name: str, extras: frozenset[str] = frozenset()) -> set[tuple[str, frozenset[str]]]:
    """The distribution and all that it pulls in, each with the extras asked of it."""
    found: set[tuple[str, frozenset[str]]] = set()
    waiting = [(canonicalize_name(name), extras)]
    while waiting:
        here = waiting.pop()
        if here in found:
            continue
        found.add(here)
        for line in distribution(here[0]).requires or []:
            needed = Requirement(line)
            markers = [{"extra": extra} for extra in here[1] | {""}]
            if needed.marker is None or any(needed.marker.evaluate(m) for m in markers):
                waiting.append((canonicalize_name(needed.name), frozenset(needed.extras)))
    return found


def test_every_imported_package_is_declared() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING],
        env={"REDIS_URL": "redis://127.0.0.1:1", "DATABASE_URL": "postgresql://127.0.0.1/none"},
        capture_output=True,
        text=True,
        check=True,
    )
    declared = {name for name, _ in _declared("rag_service")}
    owners = packages_distributions()
    missing = {
        module: owners[module]
        for module in json.loads(done.stdout)
        if module in owners
        and not {canonicalize_name(owner) for owner in owners[module]} & declared
    }
    assert missing == {}
