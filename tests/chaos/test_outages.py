"""The database, the document store or every process stops: all documents are processed."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from rag_service.config.loader import get_settings
from rag_service.database.engine import DatabaseError
from tests.chaos import event_log, faults, outcome_check
from tests.chaos.chaos_service import PROGRAMS, SHIPPED_TIMES, ChaosService, open_chaos_service
from tests.chaos.faults import Fault
from tests.processes import kill

_SEED = 11
_LIMIT_SECONDS = 240.0
_DOCUMENTS, _PAGES = 8, 12
_MISSING_SECONDS = 3.0


@pytest.fixture
def chaos() -> Iterator[ChaosService]:
    with open_chaos_service(_SEED, **SHIPPED_TIMES) as chaos:
        yield chaos


def test_postgres_killed_twice_makes_no_page_read_twice(chaos: ChaosService) -> None:
    """Each fork waits for PostgreSQL and stores what it has read."""
    chaos.start_programs()
    _add_documents(chaos)
    for _ in range(2):
        _wait_for_pages(chaos, 10)
        fault = _kill_postgres(chaos)
    assert fault.in_progress
    chaos.wait_all(_LIMIT_SECONDS)
    outcome_check.require_complete(chaos, chaos.documents)
    # The lease outlives the restart, so no page in progress is read again.
    assert outcome_check.require_few_requests(chaos, []) == {}


def test_a_document_store_that_is_missing_for_a_moment_fails_no_document(
    chaos: ChaosService,
) -> None:
    chaos.start_programs()
    # More documents than forks, so that some are still to be opened.
    for _ in range(2):
        _add_documents(chaos)
    _wait_for_pages(chaos, 5)
    folder = get_settings().data_dir / "documents"
    moved = folder.with_name("moved")
    folder.rename(moved)
    chaos.service.programs.wait_until(
        lambda: "No run is claimed without the document store" in chaos.service.programs.tails(),
        "a fork cannot reach the store",
    )
    time.sleep(_MISSING_SECONDS)
    moved.rename(folder)
    chaos.wait_all(_LIMIT_SECONDS)
    outcome_check.require_complete(chaos, chaos.documents)
    assert outcome_check.require_few_requests(chaos, []) == {}


def test_after_a_stop_of_all_programs_the_next_start_goes_on(chaos: ChaosService) -> None:
    """SIGTERM to all: pages in flight are stored, no run stays claimed, no page is read twice."""
    programs = [chaos.start_program(name) for name in PROGRAMS]
    chaos.service.programs.wait_ready(*programs[1:])
    _add_documents(chaos)
    _wait_for_pages(chaos, 10)
    for program in programs:
        program.signal(signal.SIGTERM)
    codes = [program.wait() for program in programs]
    assert codes == [0] * len(codes), chaos.service.programs.tails()
    assert event_log.unfinished()
    assert event_log.claimed_runs() == []
    blame = chaos.service.rows("SELECT sum(crashes + expiries) AS blame FROM runs")[0].blame
    assert blame == 0

    chaos.start_programs()
    chaos.wait_all(_LIMIT_SECONDS)
    outcome_check.require_complete(chaos, chaos.documents)
    assert outcome_check.require_few_requests(chaos, []) == {}


def _add_documents(chaos: ChaosService) -> None:
    for _ in range(_DOCUMENTS):
        chaos.add_document(_PAGES)


def _wait_for_pages(chaos: ChaosService, count: int) -> None:
    since = event_log.now()
    chaos.service.programs.wait_until(
        lambda: event_log.pages_read_since(since) >= count,
        f"{count} more pages are read",
        _LIMIT_SECONDS,
    )


def _kill_postgres(chaos: ChaosService) -> Fault:
    """SIGKILL of PostgreSQL's main process; its supervisor restarts it."""
    fault = faults.all_hit("PostgreSQL killed")
    pid = chaos.server_pid("postgres")
    assert pid is not None
    kill(pid)
    chaos.service.programs.wait_until(
        lambda: _answers(chaos, pid), "PostgreSQL is back", _LIMIT_SECONDS
    )
    return fault


def _answers(chaos: ChaosService, old: int) -> bool:
    if chaos.server_pid("postgres") in (None, old):
        return False
    try:
        event_log.now()
    except DatabaseError:
        return False
    return True
