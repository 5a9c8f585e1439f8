"""Every state in which a broker answers with errors: no process ends, no document is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from rag_service.config.loader import get_settings
from rag_service.monitoring import readiness
from tests.fakes.own_broker import OwnBroker
from tests.service import Scan, Service, open_service

_SECONDS = 6.0
_DOCUMENTS, _PAGES = 6, 3
STATES = [
    OwnBroker.read_only,
    OwnBroker.master_down,
    OwnBroker.out_of_memory,
    OwnBroker.unable_to_save,
    OwnBroker.without_replicas,
    OwnBroker.another_password,
    OwnBroker.forbidden,
    OwnBroker.wrong_type,
    OwnBroker.loading,
]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[OwnBroker]:
    with OwnBroker(tmp_path) as broker:
        yield broker


@pytest.fixture
def service(stack: dict[str, str], broker: OwnBroker, tmp_path: Path) -> Iterator[Service]:
    with open_service(stack | {"REDIS_URL": broker.url}, tmp_path) as service:
        service.programs.start_maintenance()
        workers = [service.programs.start_worker(stage, 3) for stage in ("prepare", "ocr")]
        service.programs.wait_ready(*workers)
        yield service


@pytest.mark.parametrize("state", STATES)
def test_a_state_of_the_broker_loses_no_document(
    service: Service,
    broker: OwnBroker,
    state: Callable[[OwnBroker], AbstractContextManager[None]],
) -> None:
    scans = [Scan(service, _PAGES) for _ in range(_DOCUMENTS)]
    with state(broker):
        said = readiness.broker_faults(get_settings())
        scans += [Scan(service, _PAGES) for _ in range(_DOCUMENTS)]
        time.sleep(_SECONDS)
    assert [fault.name for fault in said] == ["broker"]
    assert [one.ended().status for one in scans] == ["processed"] * len(scans)
    assert [program.exit_code for program in service.programs.all] == [None] * 3
    assert readiness.broker_faults(get_settings()) == []
