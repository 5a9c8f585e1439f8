"""The workflow of the RunPod handler's image runs on every change of what is in the image."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github/workflows/runpod-handler.yml"
DOCKERFILE = "workers/runpod_handler/Dockerfile"


@pytest.fixture(scope="module")
def paths() -> list[str]:
    workflow: dict[Any, Any] = yaml.safe_load(WORKFLOW.read_text())
    # YAML 1.1 reads the key `on` as true.
    listed: list[str] = workflow[True]["push"]["paths"]
    return listed


def files() -> list[Path]:
    """Return the repository's files that pip packs, and those that decide how."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    roots = [pattern.removesuffix("*") for pattern in packages]
    named = [project["project"]["readme"], "LICENSE", "pyproject.toml", "constraints.txt"]
    found = [path for root in roots for path in (ROOT / root).rglob("*") if path.is_file()]
    kept = [path.relative_to(ROOT) for path in found if "__pycache__" not in path.parts]
    return [*kept, *map(Path, named), Path(".dockerignore"), WORKFLOW.relative_to(ROOT)]


def test_every_file_of_the_image_starts_the_workflow(paths: list[str]) -> None:
    missed = [
        str(file)
        for file in files()
        # `**` stands for any folders, which fnmatch's star does anyway.
        if not any(fnmatch(str(file), path.replace("**", "*")) for path in paths)
    ]
    assert missed == []
    assert Path(DOCKERFILE) in files()


def test_every_path_of_the_workflow_exists(paths: list[str]) -> None:
    for path in paths:
        assert list(ROOT.glob(path)), path


def test_the_build_context_has_everything_that_the_image_needs() -> None:
    ignored = [line for line in (ROOT / ".dockerignore").read_text().split() if line]
    roots = {file.parts[0] for file in files()} - {".dockerignore", ".github"}
    assert roots.isdisjoint(ignored)
    copied = [line for line in (ROOT / DOCKERFILE).read_text().splitlines() if "COPY" in line]
    assert "COPY . ." in copied
