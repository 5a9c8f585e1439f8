"""docker-compose.customer.yml passes `docker-compose config`; its commands run as written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rag_service.config.options import Settings
from tests.net import free_port

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.customer.yml"
SECRETS = {
    "IMAGE_TAG": "0.1.0",
    "POSTGRES_PASSWORD": "postgres-secret",
    "REDIS_PASSWORD": "redis-secret",
    "RAG_SERVICE_API_KEY": "api-secret",
    "RAG_SERVICE_FLOWER_BASIC_AUTH": "operator:flower-secret",
}


def _compose(folder: Path, secrets: dict[str, str]) -> subprocess.CompletedProcess[str]:
    if shutil.which("docker-compose") is None:
        if os.environ.get("CI"):
            pytest.fail("docker-compose is missing; .ci/run installs it")
        pytest.skip("docker-compose is not installed")
    shutil.copy(COMPOSE, folder)
    (folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in secrets.items()))
    return subprocess.run(
        ["docker-compose", "-f", COMPOSE.name, "config"],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_file_is_valid(tmp_path: Path) -> None:
    done = _compose(tmp_path, SECRETS)
    assert done.returncode == 0, done.stderr
    services: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    assert services["ocr_worker"]["command"] == ["worker", "ocr"]
    assert services["api"]["environment"]["DATABASE_URL"].startswith("postgresql://rag_service:")


GPU = {"COMPOSE_PROFILES": "gpu", "GLMOCR_BASE_URL": "http://glm_ocr:5002"}
RUNPOD = {
    "RAG_SERVICE_OCR_TRANSPORT": "runpod",
    "RUNPOD_ENDPOINT_ID": "ep",
    "RUNPOD_API_KEY": "runpod-secret",
}


@pytest.mark.parametrize(("reader", "gpus"), [(GPU, {"glm_ocr"}), (RUNPOD, set())])
def test_the_ocr_server_is_chosen_in_the_env_file(
    tmp_path: Path, reader: dict[str, str], gpus: set[str]
) -> None:
    done = _compose(tmp_path, SECRETS | reader)
    assert done.returncode == 0, done.stderr
    services: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    # Older versions list services of other profiles too.
    started = {
        name
        for name, service in services.items()
        if reader.get("COMPOSE_PROFILES", "") in service.get("profiles", [""])
        or "profiles" not in service
    }
    assert {name for name in started if "deploy" in services[name]} == gpus
    own = services["ocr_worker"]["environment"]
    assert {name: own.get(name) for name in reader} == reader
    assert ("GLMOCR_BASE_URL" in own) == (reader is GPU), "an unused server causes a warning"


@pytest.mark.parametrize("missing", sorted(SECRETS))
def test_a_missing_secret_is_named(tmp_path: Path, missing: str) -> None:
    secrets = {name: value for name, value in SECRETS.items() if name != missing}
    done = _compose(tmp_path, secrets)
    assert done.returncode != 0
    assert missing in done.stderr


@pytest.fixture
def environment(settings: Settings, migrated: str, stack: dict[str, str]) -> dict[str, str]:
    """Return the environment of a service, with the hosts of the compose file replaced."""
    here = {
        "DATABASE_URL": migrated,
        "REDIS_URL": stack["REDIS_URL"],
        "RAG_SERVICE_DATA_DIR": str(settings.data_dir),
        "RAG_SERVICE_API_PORT": str(free_port()),
        "RAG_SERVICE_FLOWER_PORT": str(free_port()),
        "OCR_WORKER_CONCURRENCY": "2",
    }
    return {**os.environ, **SECRETS, **here}


def _service(name: str) -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
    return services[name]


def _environment(name: str, environment: dict[str, str]) -> dict[str, str]:
    """Return the service's own variables without the hosts and secrets of compose."""
    own = {key: value for key, value in _service(name)["environment"].items() if "${" not in value}
    own = {key: "127.0.0.1" if value == "0.0.0.0" else value for key, value in own.items()}
    return {**environment, "GLMOCR_BASE_URL": "http://127.0.0.1:9", **own}


def _rag_service(name: str) -> list[str]:
    return [str(Path(sys.executable).with_name("rag-service")), *_service(name)["command"]]


def test_migrate_succeeds(environment: dict[str, str]) -> None:
    done = subprocess.run(
        _rag_service("migrate"),
        env=_environment("migrate", environment),
        timeout=60,
        check=False,
    )
    assert done.returncode == 0


@pytest.mark.parametrize("name", ["api", "prepare_worker", "ocr_worker", "maintenance", "flower"])
def test_each_service_becomes_healthy_and_stops_in_time(
    environment: dict[str, str], name: str, tmp_path: Path
) -> None:
    service, env = _service(name), _environment(name, environment)
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(_rag_service(name), env=env, stdout=output, stderr=output)
    try:
        check = [sys.executable, *service["healthcheck"]["test"][2:]]
        deadline = time.monotonic() + 60
        while subprocess.run(check, env=env, capture_output=True, check=False).returncode:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        process.terminate()
        assert process.wait(timeout=60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def test_a_health_check_fails_if_nothing_runs(environment: dict[str, str]) -> None:
    for name in ("api", "prepare_worker", "ocr_worker", "maintenance", "flower"):
        check = [sys.executable, *_service(name)["healthcheck"]["test"][2:]]
        done = subprocess.run(check, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 1, name
        assert done.stderr.strip(), name
