"""Every imported package is declared; development tools do not hide a missing one."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import distribution, packages_distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

IMPORT_EVERYTHING = """
import json, pkgutil, sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    names = set(json.load(sys.stdin))

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"{name} is not declared", name=name)

sys.meta_path.insert(0, Absent())
import kombu.transport.redis, uvicorn.loops.auto, sqlalchemy.dialects.postgresql.psycopg
import rag_service, workers
for package in (rag_service, workers):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.startswith(("rag_service.pdf.child.", "workers.runpod_handler.")):
            __import__(module.name)
"""


def _declared(name: str, extras: frozenset[str] = frozenset()) -> set[tuple[str, frozenset[str]]]:
    """Return the distribution and all its dependencies, each with the requested extras."""
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


def test_all_modules_import_with_only_the_declared_packages() -> None:
    """Packages that are installed for development or another extra only are made absent."""
    declared = {name for name, _ in _declared("rag_service")}
    absent = [
        module
        for module, owners in packages_distributions().items()
        if not {canonicalize_name(owner) for owner in owners} & declared
    ]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING],
        input=json.dumps(absent),
        env={"REDIS_URL": "redis://127.0.0.1:1", "DATABASE_URL": "postgresql://127.0.0.1/none"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "pytest" in absent
    assert done.returncode == 0, done.stderr
