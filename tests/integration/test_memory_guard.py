"""A machine that is short of memory begins no OCR and logs it."""

import logging

import pytest

from rag_service.config.loader import get_settings
from rag_service.documents.storage import DocumentStore
from rag_service.jobs import live_workers
from rag_service.runtime.memory import available_mib, has_enough_memory
from rag_service.states import RunState, Stage
from tests import simulation as sim
from workers.memory_guard import MemoryGuard
from workers.run_loop import work_on_next

# More than any machine has.
TOO_MUCH = str(1 << 40)


@pytest.fixture
def guard(environment):
    """Return a function that turns the guard on with this minimum and returns the settings."""

    def turn_on(least: str = TOO_MUCH, *, enabled: bool = True):
        environment(
            RAG_SERVICE_MEMORY_GUARD_ENABLED=str(enabled).lower(),
            RAG_SERVICE_MEMORY_GUARD_MIN_AVAILABLE_MIB=least,
        )
        return get_settings()

    return turn_on


def test_memory_is_enough_unless_the_guard_is_on_and_it_is_short(guard):
    assert available_mib() > 1
    assert has_enough_memory(guard("1"))
    assert has_enough_memory(guard(enabled=False))
    assert not has_enough_memory(guard())


def test_an_ocr_fork_claims_no_run_and_a_prepare_fork_does(guard):
    guard()
    DocumentStore(get_settings()).check()
    run = sim.ready_run()
    assert "short of memory" in work_on_next(Stage.OCR, "a-task", _never).text
    assert sim.run_row(run.id).state == RunState.READY
    assert "no run waits" in work_on_next(Stage.PREPARE, "a-task", _never).text


def test_the_fork_logs_once_that_it_stops_claiming_and_once_that_it_resumes(guard, caplog):
    caplog.set_level(logging.INFO)
    memory_guard, short = MemoryGuard(), guard()
    assert not memory_guard.allows_claim(short)
    assert not memory_guard.allows_claim(short)
    assert memory_guard.allows_claim(guard("1"))
    levels = [record.levelname for record in caplog.records if "memory" in record.getMessage()]
    assert levels == ["WARNING", "INFO"]


def test_no_wake_up_message_is_sent_for_forks_that_claim_no_run(database):
    live_workers.heartbeat("short", Stage.OCR, 8, low_memory=True)
    assert live_workers.wake_ups_wanted(live_workers.of_stage(Stage.OCR), 5, 5) == 0
    live_workers.heartbeat("other", Stage.OCR, 2)
    assert live_workers.wake_ups_wanted(live_workers.of_stage(Stage.OCR), 5, 5) == 2


async def _never(_: object) -> None:
    raise AssertionError("no run should be worked on")
