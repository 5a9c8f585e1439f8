"""`python -OO` removes docstrings and assertions: nothing that users see depends on them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORT_ALL = """
import importlib, pkgutil, rag_service, workers
for package in (rag_service, workers):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
"""
RAISE_ALL = """
from rag_service.errors import RagServiceError
def check(cls):
    try:
        raise cls()
    except RagServiceError as error:
        assert_(str(error) == cls.default_message and cls.default_message.endswith("."), cls)
    for subclass in cls.__subclasses__():
        check(subclass)
def assert_(condition, what):
    if not condition:
        raise SystemExit(f"failed: {what}")
check(RagServiceError)
"""
LOAD_SETTINGS = """
from rag_service.config.loader import load_settings
from rag_service.cli.settings_table import settings_page
load_settings()
if "GLMOCR_BASE_URL" not in settings_page():
    raise SystemExit("the table of settings is empty")
"""


def run_optimized(*arguments: str) -> str:
    # No server is reached: the broker's and the database's addresses only have to be valid.
    servers = {
        "REDIS_URL": "redis://127.0.0.1:1/0",
        "DATABASE_URL": "postgresql://x@127.0.0.1:1/x",
        "COLUMNS": "200",
    }
    done = subprocess.run(
        [sys.executable, "-OO", "-B", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | servers,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "program",
    [IMPORT_ALL + RAISE_ALL, LOAD_SETTINGS],
    ids=["every module and error", "settings"],
)
def test_modules_errors_and_settings_work(program: str) -> None:
    run_optimized("-c", program)


def test_the_command_line_works_and_its_options_are_explained() -> None:
    command = ("-m", "rag_service.cli.main")
    assert run_optimized(*command, "--version").startswith("rag-service ")
    assert "searchable knowledgebase" in run_optimized(*command, "--help")
    assert "Wait until every document" in run_optimized(*command, "ingest", "--help")
