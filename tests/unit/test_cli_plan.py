"""The programs that `run` and `up` start, and their environment."""

from pathlib import Path

import pytest

from rag_service.cli.start_plan import (
    PROGRAMS,
    StartPlan,
    child_environment,
    cpu_ocr_url,
    embedded_ocr_environment,
)
from rag_service.config.loader import CONFIG_VARIABLE, is_chosen, load_settings


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OCR_WORKER_CONCURRENCY", "GLMOCR_PIPELINE_MAX_WORKERS", CONFIG_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_the_embedded_ocr_server_has_its_own_limits() -> None:
    settings = load_settings()
    environment = embedded_ocr_environment(settings, "127.0.0.1", 5002)
    assert environment["GLMOCR_BASE_URL"] == "http://127.0.0.1:5002"
    assert environment["GLMOCR_MODEL"] == "pp-ocrv6-tiny"
    assert environment["OCR_WORKER_CONCURRENCY"] == str(settings.embedded.worker_concurrency)
    assert environment["GLMOCR_PIPELINE_MAX_WORKERS"] == str(settings.embedded.pages_in_flight)


def test_limits_that_the_user_set_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("ocr:\n  worker_concurrency: 8\n")
    monkeypatch.setenv(CONFIG_VARIABLE, str(own))
    monkeypatch.setenv("GLMOCR_PIPELINE_MAX_WORKERS", "3")
    environment = embedded_ocr_environment(load_settings(), "127.0.0.1", 5002)
    assert "OCR_WORKER_CONCURRENCY" not in environment
    assert "GLMOCR_PIPELINE_MAX_WORKERS" not in environment


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCR_WORKER_CONCURRENCY", "")
    assert not is_chosen("ocr.worker_concurrency")
    monkeypatch.setenv("OCR_WORKER_CONCURRENCY", "8")
    assert is_chosen("ocr.worker_concurrency")


def test_children_do_not_get_unknown_variables() -> None:
    given = {
        "GLMOCR_TYPO": "1",
        "OCR_MAX_TOKENS": "5",
        "HOME": "/h",
        "RAG_SERVICE_API_KEY_FILE": "",
    }
    kept = child_environment(given)
    assert set(given) - set(kept) == {"GLMOCR_TYPO"}


def test_programs_stop_in_the_order_api_workers_maintenance_ocr_server(tmp_path: Path) -> None:
    plan = StartPlan(load_settings(), tmp_path, drain_seconds=60)
    started = [plan.ocr_server(), *plan.workers(), plan.api(), plan.flower()]
    assert [program.name for program in started] == list(PROGRAMS)
    assert [program.name for program in plan.prepare_only()] == ["maintenance", "prepare"]


def test_workers_get_the_drain_time_to_stop(tmp_path: Path) -> None:
    plan = StartPlan(load_settings(), tmp_path, drain_seconds=60)
    for program in plan.workers():
        assert program.name == "maintenance" or program.stop_seconds > 60


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:9"),
        ("0.0.0.0", "http://127.0.0.1:9"),
        ("::", "http://[::1]:9"),
    ],
)
def test_an_address_to_listen_on_becomes_one_to_connect_to(host: str, url: str) -> None:
    assert cpu_ocr_url(host, 9) == url
