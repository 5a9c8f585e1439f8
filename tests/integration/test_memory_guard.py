"""A machine short of memory begins no OCR, and says so."""

import logging

import pytest

from rag_service.config.loader import get_settings
from rag_service.jobs import live_workers
from rag_service.runtime.memory import available_mib, has_room
from rag_service.states import RunState, Stage
from tests import simulation as sim
from workers.memory_guard import MemoryGuard
from workers.run_loop import work_on_next

# No machine has so much.
TOO_MUCH = str(1 << 40)


@pytest.fixture
def guard(environment):
    """Turns the guard on with this least; returns the settings."""

    def turn_on(least: str = TOO_MUCH, *, enabled: bool = True):
        environment(
            RAG_SERVICE_MEMORY_GUARD_ENABLED=str(enabled).lower(),
            RAG_SERVICE_MEMORY_GUARD_MIN_AVAILABLE_MIB=least,
        )
        return get_settings()

    return turn_on


def test_there_is_room_unless_the_guard_is_on_and_memory_is_short(guard):
    assert available_mib() > 1
    assert has_room(guard("1"))
    assert has_room(guard(enabled=False))
    assert not has_room(guard())


def test_an_ocr_fork_claims_nothing_and_a_prepare_fork_goes_on(guard):
    guard()
    run = sim.ready_run()
    assert "short of memory" in work_on_next(Stage.OCR, "a-task", _never)
    assert sim.run_row(run.id).state == RunState.READY
    assert work_on_next(Stage.PREPARE, "a-task", _never) == "nothing to claim"


def test_the_fork_says_once_that_it_waits_and_once_that_it_goes_on(guard, caplog):
    caplog.set_level(logging.INFO)
    gate, short = MemoryGuard(), guard()
    assert [gate.is_open(short), gate.is_open(short), gate.is_open(guard("1"))] == [
        False,
        False,
        True,
    ]
    said = [record.levelname for record in caplog.records if "memory" in record.getMessage()]
    assert said == ["WARNING", "INFO"]


def test_nobody_rings_for_forks_that_claim_nothing(database):
    live_workers.heartbeat("short", Stage.OCR, 8, low_memory=True)
    assert live_workers.wake_ups_wanted(live_workers.of_stage(Stage.OCR), 5, 5) == 0
    live_workers.heartbeat("other", Stage.OCR, 2)
    assert live_workers.wake_ups_wanted(live_workers.of_stage(Stage.OCR), 5, 5) == 2


async def _never(_: object) -> None:
    raise AssertionError("nothing is to be worked on")
