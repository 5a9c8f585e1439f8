"""One name, one thing: a class or a module can be found by its name alone."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("rag_service", "workers")
MODULES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
# Modules that Python itself names.
GIVEN_NAMES = {"__init__", "__main__"}
# The client and what every package needs: the error tree and the states.
AT_THE_TOP = {"client", "errors", "states"}


def _definitions() -> Iterator[tuple[Path, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def _doubled(places: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def test_no_two_public_classes_share_a_name() -> None:
    places = defaultdict(list)
    for path, node in _definitions():
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            places[node.name].append(str(path.relative_to(ROOT)))
    assert len(places) > 200
    assert _doubled(places) == {}


def test_no_two_modules_share_a_name() -> None:
    places = defaultdict(list)
    for path in MODULES:
        if path.stem not in GIVEN_NAMES:
            places[path.stem].append(str(path.relative_to(ROOT)))
    assert len(places) > 150
    assert _doubled(places) == {}


def test_packages_hold_the_modules() -> None:
    top = {path.stem for path in (ROOT / "rag_service").glob("*.py")}
    assert top - GIVEN_NAMES == AT_THE_TOP


def test_no_worker_module_is_nearly_empty() -> None:
    lines = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in MODULES
        if path.stem not in GIVEN_NAMES and "workers" in path.parts
    }
    assert {path for path, count in lines.items() if count <= 10} == set()
