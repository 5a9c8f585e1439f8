"""A document that kills its worker: it fails at the third crash and costs no other document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.chaos import event_log, outcome_check
from tests.chaos.chaos_service import (
    ChaosDocument,
    ChaosService,
    adding_documents,
    open_chaos_service,
)
from tests.fakes.scans import Mark
from tests.processes import kill

_SEED = 7
_LIMIT_SECONDS = 240.0
_CRASH_LIMIT = 3


@pytest.fixture
def chaos() -> Iterator[ChaosService]:
    with open_chaos_service(_SEED) as chaos:
        chaos.start_programs()
        yield chaos


def test_a_document_that_kills_its_worker_fails_and_costs_no_other(chaos: ChaosService) -> None:
    """Every page kills: there is no progress, so the third crash ends the run."""
    with adding_documents(chaos):
        _wait_for_work(chaos)
        killer = chaos.add_document(3, priority="interactive")
        kills = _kill_its_forks(chaos, killer, range(1, killer.pages + 1))
        _wait_for_work(chaos)
    chaos.wait_all(_LIMIT_SECONDS)

    ended = chaos.service.view(killer.id)
    assert ended.status == "failed"
    assert ended.error is not None
    assert ended.error.code == "worker_crashed"
    assert "lost children: 3" in ended.error.message
    assert ended.error.message.rstrip(")").endswith("pages in progress: 1, 2, 3")
    assert kills == _CRASH_LIMIT
    _require_others_untouched(chaos, killer)


def test_good_pages_of_a_document_that_kills_its_worker_are_kept(chaos: ChaosService) -> None:
    """One page kills: the others are stored first and stay searchable."""
    killing = 4
    with adding_documents(chaos):
        _wait_for_work(chaos)
        killer = chaos.add_document(6, priority="interactive")
        kills = _kill_its_forks(chaos, killer, [killing], stored=killer.pages - 1)
    chaos.wait_all(_LIMIT_SECONDS)

    ended = chaos.service.view(killer.id)
    assert ended.status == "failed"
    assert ended.error is not None
    assert ended.error.code == "worker_crashed"
    assert ended.error.message.rstrip(")").endswith(f"pages in progress: {killing}")
    assert kills == _CRASH_LIMIT
    pages = {page.number: page for page in chaos.service.pages(killer.id)}
    for number in set(pages) - {killing}:
        assert pages[number].markdown == Mark(killer.number, number).text
    _require_others_untouched(chaos, killer)


def _kill_its_forks(
    chaos: ChaosService, killer: ChaosDocument, killing: range | list[int], *, stored: int = 0
) -> int:
    """Kill its fork when these pages are sent and `stored` others stored, until the run ends.

    Returns the number of kills.
    """
    marks = [Mark(killer.number, page) for page in killing]
    for mark in marks:
        chaos.ocr.hold(mark)
    killed: set[int] = set()

    def ended() -> bool:
        # All killing pages are sent, as if the last one had killed the fork.
        done = chaos.service.view(killer.id).latest_run.pages.done
        if done >= stored and all(chaos.ocr.alive(mark) for mark in marks):
            port = chaos.ocr.of(marks[-1])[-1].client_port
            with suppress(AssertionError):
                pid = chaos.service.programs.fork_at(port)
                kill(pid)
                killed.add(pid)
        return chaos.service.view(killer.id).latest_run.status == "failed"

    chaos.service.programs.wait_until(ended, "the killer has failed", _LIMIT_SECONDS)
    return len(killed)


def _wait_for_work(chaos: ChaosService) -> None:
    since = event_log.now()
    chaos.service.programs.wait_until(
        lambda: event_log.pages_read_since(since) > 10,
        "other documents are in progress",
        _LIMIT_SECONDS,
    )


def _require_others_untouched(chaos: ChaosService, killer: ChaosDocument) -> None:
    others = [document for document in chaos.documents if document is not killer]
    assert len(others) > 3
    outcome_check.require_complete(chaos, others)
    asked = Counter(
        request.mark
        for request in chaos.ocr.requests
        if request.mark and request.mark.document != killer.number
    )
    assert set(asked.values()) == {1}
    rows = chaos.service.rows(
        "SELECT sum(crashes + expiries) AS blame FROM runs WHERE document_id <> :id", id=killer.id
    )
    assert rows[0].blame == 0
