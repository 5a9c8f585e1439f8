"""The search keeps servers full that it was never tuned on.

Time is simulated. The share is of the best fixed number of requests, with the same pages.
"""

from __future__ import annotations

import random
from functools import cache

import pytest

from rag_service.ocr.concurrency.search import ConcurrencySearch
from rag_service.ocr.concurrency.search_state import Aim
from rag_service.ocr.server_gauges import ServerGauges
from tests.simulators.simulated_batch import UNTUNED, Batch

PROCESSES = 4
TIMEOUT = 300.0
WARM_UP, LENGTH = 300.0, 1200.0
FIXED = (4, 8, 12, 16, 24, 32, 48)


@cache
def pages_with_best_fixed_number(name):
    return max(pages_with_fixed_number(name, number) for number in FIXED)


def pages_with_fixed_number(name, number):
    """Pages that are answered in LENGTH seconds after the warm-up."""
    batch = Batch(UNTUNED[name], seed=1)
    for key in range(number):
        batch.arrive(key)
    before = 0
    while batch.now < WARM_UP + LENGTH:
        if batch.now < WARM_UP:
            before = batch.finished
        for key in batch.advance(batch.next_event()):
            batch.arrive(key)
    return batch.finished - before


def pages_with_search(name, *, gauged):
    batch, keys, before = Batch(UNTUNED[name], seed=1), 0, 0
    searches = [
        ConcurrencySearch(Aim(timeout=TIMEOUT), chance=random.Random(n)) for n in range(PROCESSES)
    ]
    sent = [{} for _ in searches]
    next_sample = 0.0
    while batch.now < WARM_UP + LENGTH:
        if batch.now < WARM_UP:
            before = batch.finished
        for search, requests in zip(searches, sent, strict=True):
            while search.admits(len(requests), batch.now):
                keys += 1
                requests[keys] = batch.now
                batch.arrive(keys)
        for key in batch.advance(min(batch.next_event(), next_sample)):
            for search, requests in zip(searches, sent, strict=True):
                if key in requests:
                    search.answered(batch.now - requests.pop(key), batch.now)
        if batch.now >= next_sample:
            next_sample += 1.0
            gauges = ServerGauges(batch.running, batch.waiting, batch.answer_tokens)
            for search, requests in zip(searches, sent, strict=True):
                search.tick(len(requests), gauges if gauged else None, batch.now)
    return batch.finished - before


@pytest.mark.parametrize("name", sorted(UNTUNED))
@pytest.mark.parametrize(("gauged", "share"), [(True, 0.95), (False, 0.9)])
def test_the_search_is_near_the_best_fixed_number(name, gauged, share):
    assert pages_with_search(name, gauged=gauged) >= share * pages_with_best_fixed_number(name)
