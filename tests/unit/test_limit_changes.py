"""Each change of the limit is logged with its reason and counted."""

from __future__ import annotations

import logging

from rag_service.ocr.concurrency.changes import ChangeCount, ChangeLog, ChangeReason
from rag_service.ocr.concurrency.search import ConcurrencySearch
from rag_service.ocr.concurrency.search_state import Aim


def test_lasting_changes_are_logged_at_info_and_trials_at_debug(caplog):
    caplog.set_level(logging.DEBUG, "rag_service.ocr.concurrency.changes")
    changes = ChangeLog("http://gpu:8000")
    changes.add(10.0, 12.0, ChangeReason.MORE_GAINED)
    changes.add(12.0, 15.0, ChangeReason.TRIED_MORE)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "Requests in flight at http://gpu:8000: 10.0 -> 12.0, more_gained"),
        ("DEBUG", "Requests in flight at http://gpu:8000: 12.0 -> 15.0, tried_more"),
    ]


def test_counts_keep_the_last_change_and_are_taken_once():
    changes = ChangeLog()
    changes.add(1.0, 2.0, ChangeReason.DOUBLED)
    changes.add(2.0, 4.0, ChangeReason.DOUBLED)
    assert changes.take() == {ChangeReason.DOUBLED: ChangeCount(2, 2.0, 4.0)}
    assert changes.take() == {}


def test_the_search_names_its_start_a_time_out_and_other_processes():
    search = ConcurrencySearch(Aim(timeout=120.0), start=4.0, among=8)
    search.timed_out(0.0)
    for _ in range(2):
        search.share_with(1)
    assert search.changes.take() == {
        ChangeReason.STARTED: ChangeCount(1, 0.0, 4.0),
        ChangeReason.TIMED_OUT: ChangeCount(1, 4.0, 2.0),
        ChangeReason.PROCESSES_CHANGED: ChangeCount(1, 2.0, 16.0),
    }
