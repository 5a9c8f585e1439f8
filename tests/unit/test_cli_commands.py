"""The command line: its help, its errors, its imports."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError
from typer.main import get_command

from rag_service import errors
from rag_service.cli import main as cli_main
from rag_service.cli.main import app, exit_status
from rag_service.cli.settings_table import settings_page
from rag_service.client import error_classes
from rag_service.config.option_list import options

COMMANDS = {
    "run", "up", "ingest", "status", "show", "cancel", "delete", "reprocess", "reprocess-jobs",
    "worker", "serve",
    "flower", "cpu-ocr-server", "layout-server", "migrate", "probe", "settings",
}  # fmt: skip
HEAVY = {
    "pydantic",
    "sqlalchemy",
    "celery",
    "httpx",
    "rich",
    "fastapi",
    "uvicorn",
    "numpy",
    "pymupdf",
}


def all_errors(kind: type[errors.RagServiceError]) -> Iterator[type[errors.RagServiceError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from all_errors(below)


def test_the_commands_are_the_documented_ones() -> None:
    assert set(get_command(app).commands) == COMMANDS


def test_every_command_and_every_parameter_has_help() -> None:
    for name, command in get_command(app).commands.items():
        summary = command.get_short_help_str(limit=200)
        assert summary, name
        assert "\n" not in summary, name
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name}: {parameter.name}"


def test_the_command_line_imports_no_heavy_package() -> None:
    code = "import sys, rag_service.cli.main; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert HEAVY.isdisjoint(loaded.stdout.split())


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.ConfigurationError(), 2),
        (errors.InvalidOptions(), 2),
        (errors.Unauthorized(), 2),
        (errors.Forbidden(), 2),
        (errors.ServiceUnreachable(), 3),
        (errors.StorageUnavailable(), 3),
        (errors.DatabaseUnavailable(), 3),
        (errors.NotFound(), 1),
        (errors.CorruptPdf(), 1),
        (ValueError(), 1),
    ],
)
def test_exit_status(error: Exception, status: int) -> None:
    assert exit_status(error) == status


def test_a_database_outage_of_any_command_exits_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise OperationalError("SELECT 1", {}, Exception("connection to 10.0.0.1 refused"))

    monkeypatch.setattr(cli_main, "app", command)
    with pytest.raises(SystemExit) as exited:
        cli_main.main()
    assert exited.value.code == 3
    printed = capsys.readouterr().err
    assert "PostgreSQL cannot be reached." in printed
    assert "SELECT" not in printed


def test_every_code_finds_a_class_with_that_code() -> None:
    found = error_classes()
    for kind in all_errors(errors.RagServiceError):
        assert found[kind.code].code == kind.code
    assert found["internal"] is errors.Internal
    assert found["ocr_unavailable"] is errors.OcrUnavailable


def test_the_settings_page_has_every_option_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app(["settings"])
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) == len(options())
    for option in options():
        assert sum(f"| `{option.key}` | `{option.env}` | " in row for row in rows) == 1


def test_the_settings_page_parts_common_from_expert_options() -> None:
    page = settings_page()
    common, _, expert = page.partition("## OCR\n")[2].partition("### OCR: expert")
    assert "GLMOCR_BASE_URL" in common
    assert "RAG_SERVICE_OCR_POOL_TIMEOUT" in expert.partition("\n## ")[0]
    assert 35 <= sum(not option.expert for option in options()) <= 50


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rag_service.cli.main", *arguments],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, env=os.environ | env,
    )  # fmt: skip


def test_an_invalid_setting_is_one_sentence_and_status_2() -> None:
    done = run("status", OCR_MAX_TOKENS="many")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "ocr.max_tokens" in done.stderr
    assert "OCR_MAX_TOKENS" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unreachable_service_is_status_3_with_advice() -> None:
    done = run("status", RAG_SERVICE_URL="http://127.0.0.1:9")
    assert done.returncode == 3
    assert "rag-service up" in done.stderr
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback() -> None:
    assert "Traceback" in run("--debug", "status", RAG_SERVICE_URL="http://127.0.0.1:9").stderr


def test_an_unknown_variable_gets_a_warning_with_a_suggestion() -> None:
    done = run("status", OCR_MAX_TOKEN="5", RAG_SERVICE_URL="http://127.0.0.1:9")
    assert "OCR_MAX_TOKEN is not a setting" in done.stderr
    assert "Did you mean OCR_MAX_TOKENS?" in done.stderr


@pytest.mark.parametrize("command", [("run",), ("ingest", "no-such-file"), ("worker", "painter")])
def test_wrong_usage_is_status_2(command: tuple[str, ...]) -> None:
    assert run(*command).returncode == 2


@pytest.mark.parametrize(
    "redirection", [">&-", "2>&-", "<&-", ">&- 2>&- <&-", "| true", "| head -1"]
)
@pytest.mark.parametrize("command", ["settings", "--help", "status"])
def test_a_closed_stream_is_no_traceback(command: str, redirection: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m rag_service.cli.main {command} {redirection}"],
        capture_output=True, text=True, env=os.environ | {"RAG_SERVICE_URL": "http://127.0.0.1:9"},
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert "This is a bug" not in done.stderr


def test_a_full_disk_behind_stdout_is_a_sentence() -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m rag_service.cli.main settings > /dev/full"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_flower_beyond_loopback_needs_credentials() -> None:
    done = run("flower", RAG_SERVICE_FLOWER_HOST="0.0.0.0")
    assert done.returncode == 2
    assert "RAG_SERVICE_FLOWER_BASIC_AUTH" in done.stderr


def test_a_closed_stdout_is_not_an_error() -> None:
    program = subprocess.Popen(
        [sys.executable, "-m", "rag_service.cli.main", "settings"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert program.stdout is not None
    program.stdout.close()
    _, error_output = program.communicate()
    assert error_output == ""


WRONG_SETTINGS = [
    ({"RAG_SERVICE_PARSER_DEFAULT": "nix"}, "parser.default", 2),
    ({"REDIS_URL": "http://x"}, "redis.url", 2),
    ({"REDIS_URL": "localhost:6379"}, "redis.url", 2),
    ({"DATABASE_URL": "mysql://x/y"}, "database.url", 2),
    ({"RAG_SERVICE_STORAGE_URL": "ftp://x"}, "storage.url", 2),
    ({"RAG_SERVICE_STORAGE_URL": "file:///proc/nope"}, "storage.url", 3),
    ({"RAG_SERVICE_DATA_DIR": "/proc/nope"}, "data_dir", 2),
    ({"RAG_SERVICE_LEASE_SECONDS": "1"}, "lease.give_up_after", 2),
    ({"RUNPOD_API_BASE": "api.runpod.ai/v2"}, "runpod.api_base", 2),
    ({"RAG_SERVICE_API_PUBLIC_URL": "http://rag.example.com"}, "api.public_url", 2),
]
RUNPOD = {"RAG_SERVICE_OCR_TRANSPORT": "runpod"}
WITHOUT_RUNPOD = [
    (RUNPOD | {"RUNPOD_ENDPOINT_ID": "e"}, "RUNPOD_API_KEY", 2),
    (RUNPOD | {"RUNPOD_API_KEY": "k"}, "RUNPOD_ENDPOINT_ID", 2),
]


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        *((("up",), wrong) for wrong in WRONG_SETTINGS),
        *((("serve",), WRONG_SETTINGS[index]) for index in (0, 1, 5, 6)),
        *((("worker", "prepare"), WRONG_SETTINGS[index]) for index in (0, 1, 4)),
        (("run", __file__), WRONG_SETTINGS[0]),
        *(
            (command, wrong)
            for command in (
                ("up",),
                ("run", __file__),
                ("worker", "ocr"),
                ("worker", "maintenance"),
            )
            for wrong in WITHOUT_RUNPOD
        ),
    ],
)
def test_no_service_starts_with_a_wrong_setting(
    tmp_path: Path, command: tuple[str, ...], wrong: tuple[dict[str, str], str, int]
) -> None:
    variables, key, status = wrong
    done = run(*command, **{"RAG_SERVICE_DATA_DIR": str(tmp_path)} | variables)
    assert (done.returncode, key in done.stderr) == (status, True), done.stderr
    assert "Traceback" not in done.stderr
    assert "is up" not in done.stderr
    assert "Starting" not in done.stderr
    assert not (tmp_path / "logs" / "postgres.log").exists(), "no server was started"


def test_a_run_that_sends_no_page_needs_no_endpoint(tmp_path: Path) -> None:
    """It fails for its argument, not for a setting that it would not use."""
    done = run("run", "--ocr", "off", "--parser", "nix", __file__, **RUNPOD)
    assert (done.returncode, "nix" in done.stderr) == (2, True)
    assert "RUNPOD" not in done.stderr


@pytest.mark.parametrize("command", [("up",), ("serve",), ("worker", "ocr"), ("status",)])
def test_no_log_level_hides_the_warning_of_an_unknown_variable(command: tuple[str, ...]) -> None:
    # The wrong parser ends the commands that would keep running.
    done = run(
        *command, RAG_SERVICE_LOG_LEVEL="ERROR", RAG_SERVICE_PARSR_DEFAULT="x",
        RAG_SERVICE_PARSER_DEFAULT="nix", RAG_SERVICE_URL="http://127.0.0.1:9",
    )  # fmt: skip
    assert done.stderr.count("Did you mean RAG_SERVICE_PARSER_DEFAULT?") == 1
