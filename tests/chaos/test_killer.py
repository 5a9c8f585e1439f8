"""A document that kills its worker: given up at the third crash, at nobody else's cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.chaos import verdict, witness
from tests.chaos.rig import Fed, Rig, feeding, open_rig
from tests.fakes.scans import Mark
from tests.processes import kill

_SEED = 7
_PATIENCE = 120.0
_CRASH_LIMIT = 3


@pytest.fixture
def rig() -> Iterator[Rig]:
    with open_rig(_SEED) as rig:
        rig.start_programs()
        yield rig


def test_a_document_that_kills_its_worker_is_given_up_and_costs_no_other(rig: Rig) -> None:
    """Every page kills: no progress, so three dead children end it."""
    with feeding(rig):
        _wait_for_work(rig)
        killer = rig.feed(3, priority="interactive")
        kills = _kill_whoever_holds(rig, killer, range(1, killer.pages + 1))
        _wait_for_work(rig)
    rig.wait_all(_PATIENCE)

    ended = rig.service.view(killer.id)
    assert ended.status == "failed"
    assert ended.error is not None
    assert ended.error.code == "worker_crashed"
    assert "lost children: 3" in ended.error.message
    assert ended.error.message.rstrip(")").endswith("pages in progress: 1, 2, 3")
    assert kills == _CRASH_LIMIT
    _require_others_untouched(rig, killer)


def test_good_pages_of_a_document_that_kills_its_worker_are_kept(rig: Rig) -> None:
    """One page kills: the others are stored first, and what they hold stays to be found."""
    deadly = 4
    with feeding(rig):
        _wait_for_work(rig)
        killer = rig.feed(6, priority="interactive")
        kills = _kill_whoever_holds(rig, killer, [deadly], stored=killer.pages - 1)
    rig.wait_all(_PATIENCE)

    ended = rig.service.view(killer.id)
    assert ended.status == "failed"
    assert ended.error is not None
    assert ended.error.code == "worker_crashed"
    assert ended.error.message.rstrip(")").endswith(f"pages in progress: {deadly}")
    assert kills == _CRASH_LIMIT
    pages = {page.number: page for page in rig.service.pages(killer.id)}
    for number in set(pages) - {deadly}:
        assert pages[number].markdown == Mark(killer.number, number).text
    _require_others_untouched(rig, killer)


def _kill_whoever_holds(
    rig: Rig, killer: Fed, deadly: range | list[int], *, stored: int = 0
) -> int:
    """Kill the fork each time these pages are out and so many others stored, until it is over."""
    marks = [Mark(killer.number, page) for page in deadly]
    for mark in marks:
        rig.ocr.hold(mark)
    killed: set[int] = set()

    def ended() -> bool:
        # All deadly pages are out, as they would be where the last one kills.
        done = rig.service.view(killer.id).latest_run.pages.done
        if done >= stored and all(rig.ocr.alive(mark) for mark in marks):
            port = rig.ocr.of(marks[-1])[-1].client_port
            with suppress(AssertionError):
                pid = rig.service.programs.fork_at(port)
                kill(pid)
                killed.add(pid)
        return rig.service.view(killer.id).latest_run.status == "failed"

    rig.service.programs.wait_until(ended, "the killer is given up", _PATIENCE)
    return len(killed)


def _wait_for_work(rig: Rig) -> None:
    since = witness.now()
    rig.service.programs.wait_until(
        lambda: witness.pages_read_since(since) > 10, "others are at work", _PATIENCE
    )


def _require_others_untouched(rig: Rig, killer: Fed) -> None:
    others = [fed for fed in rig.fed if fed is not killer]
    assert len(others) > 3
    verdict.require_all_whole(rig, others)
    asked = Counter(
        request.mark
        for request in rig.ocr.requests
        if request.mark and request.mark.document != killer.number
    )
    assert set(asked.values()) == {1}
    rows = rig.service.rows(
        "SELECT sum(crashes + expiries) AS blame FROM runs WHERE document_id <> :id", id=killer.id
    )
    assert rows[0].blame == 0
