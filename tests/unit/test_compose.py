"""docker-compose.customer.yml repeats no default, opens nothing, and restarts and stops all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rag_service.config.loader import load_settings
from rag_service.config.option_list import options

COMPOSE = Path(__file__).parents[2] / "docker-compose.customer.yml"
SERVICE = ("migrate", "api", "prepare_worker", "ocr_worker", "maintenance", "flower")


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text())["services"]


def test_all_services_are_defined(services: dict[str, Any]) -> None:
    assert set(services) == {*SERVICE, "postgres", "redis", "glm_ocr"}


@pytest.mark.parametrize("name", SERVICE)
def test_the_service_runs_without_privileges(services: dict[str, Any], name: str) -> None:
    service = services[name]
    assert service["user"] not in {"root", "0", "0:0"}
    assert service["cap_drop"] == ["ALL"]


def test_long_running_services_have_restart_health_check_and_grace_period(
    services: dict[str, Any],
) -> None:
    for name, service in services.items():
        if name == "migrate":
            continue
        assert service["restart"] == "unless-stopped", name
        assert service["healthcheck"]["test"], name
        assert service["stop_grace_period"], name


def test_the_grace_period_exceeds_the_soft_shutdown(services: dict[str, Any]) -> None:
    for name in ("prepare_worker", "ocr_worker"):
        grace = int(services[name]["stop_grace_period"].removesuffix("s"))
        assert grace > load_settings().worker.soft_shutdown


def test_ports_are_published_on_this_machine_alone(services: dict[str, Any]) -> None:
    for service in services.values():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")


def test_published_ports_need_credentials(services: dict[str, Any]) -> None:
    published = {name for name, service in services.items() if "ports" in service}
    assert published == {"api", "flower"}
    assert ":?" in services["api"]["environment"]["RAG_SERVICE_API_KEY"]
    assert ":?" in services["flower"]["environment"]["RAG_SERVICE_FLOWER_BASIC_AUTH"]


def test_a_gpu_is_reserved_only_with_the_profile(services: dict[str, Any]) -> None:
    reserving = {name for name, service in services.items() if "deploy" in service}
    assert reserving == {"glm_ocr"}
    assert services["glm_ocr"]["profiles"] == ["gpu"]
    assert [name for name in services if "profiles" in services[name]] == ["glm_ocr"]
    needed = {other for service in services.values() for other in service.get("depends_on", {})}
    assert "glm_ocr" not in needed, "a service that depends on it would need its profile"


def test_no_default_is_repeated() -> None:
    """Only addresses and credentials are set here; everything else is in config.yaml."""
    allowed = {
        "DATABASE_URL",
        "REDIS_URL",
        "RAG_SERVICE_API_KEY",
        "RAG_SERVICE_API_HOST",
        "RAG_SERVICE_FLOWER_HOST",
        "RAG_SERVICE_FLOWER_BASIC_AUTH",
    }
    text = COMPOSE.read_text()
    named = {o.env for o in options() if re.search(rf"^\s+{o.env}:", text, re.MULTILINE)}
    assert named == allowed
    assert re.findall(r"\$\{\w+:?-", text) == []
