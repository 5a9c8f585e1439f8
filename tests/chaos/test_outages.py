"""What every process leans on goes away, or every process does: all documents end well."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from rag_service.config.loader import get_settings
from rag_service.database.engine import DatabaseError
from tests.chaos import faults, verdict, witness
from tests.chaos.faults import Fault
from tests.chaos.rig import PLACES, SHIPPED_TIMES, Rig, open_rig
from tests.processes import kill

_SEED = 11
_PATIENCE = 120.0
_DOCUMENTS, _PAGES = 8, 12
_AWAY_SECONDS = 3.0


@pytest.fixture
def rig() -> Iterator[Rig]:
    with open_rig(_SEED, **SHIPPED_TIMES) as rig:
        yield rig


def test_postgres_killed_in_the_middle_costs_no_page_twice(rig: Rig) -> None:
    """Twice killed; each fork waits for it and stores what it has read."""
    rig.start_programs()
    _feed(rig)
    for _ in range(2):
        _wait_for_pages(rig, 10)
        out = _kill_postgres(rig)
    assert out.in_hand
    rig.wait_all(_PATIENCE)
    verdict.require_all_whole(rig, rig.fed)
    # The lease outlives the restart, so nothing that was in hand is read again.
    assert verdict.require_few_requests(rig, []) == {}


def test_a_document_store_that_is_away_for_a_moment_fails_no_document(rig: Rig) -> None:
    rig.start_programs()
    # More documents than forks, so that some are still to be opened.
    for _ in range(2):
        _feed(rig)
    _wait_for_pages(rig, 5)
    folder = get_settings().data_dir / "documents"
    away = folder.with_name("away")
    folder.rename(away)
    rig.service.programs.wait_until(
        lambda: "Cannot reach the document store" in rig.service.programs.tails(),
        "a fork misses the store",
    )
    time.sleep(_AWAY_SECONDS)
    away.rename(folder)
    rig.wait_all(_PATIENCE)
    verdict.require_all_whole(rig, rig.fed)
    assert verdict.require_few_requests(rig, []) == {}


def test_everything_stopped_in_the_middle_goes_on_at_the_next_start(rig: Rig) -> None:
    """SIGTERM to all: pages in flight are stored, nothing stays held, nothing is read twice."""
    programs = [rig.start_program(place) for place in PLACES]
    rig.service.programs.wait_ready(*programs[1:])
    _feed(rig)
    _wait_for_pages(rig, 10)
    for program in programs:
        program.signal(signal.SIGTERM)
    codes = [program.wait() for program in programs]
    assert codes == [0] * len(codes), rig.service.programs.tails()
    assert witness.unfinished()
    assert witness.held() == []
    blame = rig.service.rows("SELECT sum(crashes + expiries) AS blame FROM runs")[0].blame
    assert blame == 0

    rig.start_programs()
    rig.wait_all(_PATIENCE)
    verdict.require_all_whole(rig, rig.fed)
    assert verdict.require_few_requests(rig, []) == {}


def _feed(rig: Rig) -> None:
    for _ in range(_DOCUMENTS):
        rig.feed(_PAGES)


def _wait_for_pages(rig: Rig, count: int) -> None:
    since = witness.now()
    rig.service.programs.wait_until(
        lambda: witness.pages_read_since(since) >= count, f"{count} more pages are read", _PATIENCE
    )


def _kill_postgres(rig: Rig) -> Fault:
    """SIGKILL of PostgreSQL's main process; its supervisor starts it again."""
    fault = faults.all_hit("PostgreSQL killed")
    pid = rig.server_pid("postgres")
    assert pid is not None
    kill(pid)
    rig.service.programs.wait_until(lambda: _answers(rig, pid), "PostgreSQL is back", _PATIENCE)
    return fault


def _answers(rig: Rig, old: int) -> bool:
    if rig.server_pid("postgres") in (None, old):
        return False
    try:
        witness.now()
    except DatabaseError:
        return False
    return True
