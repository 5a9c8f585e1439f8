"""Faults of every kind, one by one, then twenty without a pause: no document or page is lost."""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from rag_service.config.loader import get_settings
from tests.chaos import event_log, faults, outcome_check
from tests.chaos.chaos_service import (
    SHIPPED_TIMES,
    ChaosService,
    adding_documents,
    open_chaos_service,
)
from tests.chaos.faults import Fault, Kind

PLAN: dict[Kind, int] = {
    faults.kill_ocr_fork: 10,
    faults.kill_ocr_worker: 6,
    faults.stop_ocr_worker: 4,
    faults.kill_prepare_worker: 3,
    faults.kill_prepare_forks: 3,
    faults.kill_maintenance: 5,
    faults.empty_broker: 5,
    faults.restart_broker: 4,
    faults.unmount_store: 4,
    faults.make_database_read_only: 4,
    faults.refuse_every_page: 3,
    faults.fail_every_page: 3,
    faults.decline_every_page: 4,
}
STORM = 20
# A wake-up message and a claim take this long on a busy small machine after the round.
_NOTIFY_SECONDS = 2.0
_LIMIT_SECONDS = 240.0


@pytest.fixture
def seed() -> int:
    """CHAOS_SEED or a new seed; it is printed so that a run can be repeated."""
    seed = int(os.environ.get("CHAOS_SEED") or secrets.randbelow(10**6))
    print(f"\nCHAOS_SEED={seed}")
    return seed


@pytest.fixture
def chaos(seed: int) -> Iterator[ChaosService]:
    """The whole service with all programs running."""
    with open_chaos_service(seed) as chaos:
        chaos.start_programs()
        yield chaos


def test_faults_of_every_kind_cost_no_document_and_no_page(chaos: ChaosService, seed: int) -> None:
    order = random.Random(seed).sample(list(PLAN), sum(PLAN.values()), counts=PLAN.values())
    with adding_documents(chaos):
        injected = [_inject(chaos, kind) for kind in order]
    chaos.wait_all(_LIMIT_SECONDS)
    outcome_check.require_complete(chaos, chaos.documents)
    above = outcome_check.require_few_requests(chaos, injected)
    _report("faults", chaos, seed, injected, above)
    _require_short_waits(injected)


def test_a_storm_of_faults_costs_no_document_and_no_page(chaos: ChaosService, seed: int) -> None:
    injected: list[Fault] = []
    with adding_documents(chaos):
        for _ in range(STORM):
            _until_a_page_is_read(chaos)
            injected.append(chaos.random.choice(list(PLAN))(chaos))
    chaos.wait_all(_LIMIT_SECONDS)
    for fault in injected:
        fault.wait = max(fault.waits() or [0.0])
    outcome_check.require_complete(chaos, chaos.documents)
    above = outcome_check.require_few_requests(chaos, injected)
    _report("storm", chaos, seed, injected, above)


@pytest.mark.skipif(
    not os.environ.get("CHAOS_SHIPPED_LEASE"), reason="takes minutes; CHAOS_SHIPPED_LEASE=1 runs it"
)
def test_a_worker_stopped_past_the_default_lease_costs_no_page(seed: int) -> None:
    with open_chaos_service(seed, **SHIPPED_TIMES) as chaos:
        chaos.start_programs()
        with adding_documents(chaos):
            injected = [_inject(chaos, faults.stop_ocr_worker)]
        chaos.wait_all(_LIMIT_SECONDS)
        outcome_check.require_complete(chaos, chaos.documents)
        above = outcome_check.require_few_requests(chaos, injected)
        _report("shipped lease", chaos, seed, injected, above)
        _require_short_waits(injected)


def _require_short_waits(injected: list[Fault]) -> None:
    """Require waits of at most a lease, a maintenance round, and the restart of a sole program."""
    settings = get_settings()
    most = settings.lease.seconds + settings.maintenance.interval + _NOTIFY_SECONDS
    assert not [f for f in injected if f.wait > most + (f.back_after if f.was_alone else 0)]


def _inject(chaos: ChaosService, kind: Kind) -> Fault:
    """Inject a fault at a random moment after a page was read; return when all runs go on."""
    _until_a_page_is_read(chaos)
    time.sleep(chaos.random.uniform(0, 1.5))
    fault = kind(chaos)
    wait_until = chaos.service.programs.wait_until
    if fault.is_back is not None:
        wait_until(fault.is_back, f"the killed program works again: {fault}", _LIMIT_SECONDS)
        fault.back_after = (event_log.now() - fault.at).total_seconds()
    wait_until(lambda: fault.waits() is not None, f"all runs go on: {fault}", _LIMIT_SECONDS)
    fault.wait = max(fault.waits() or [0.0])
    print(f"{fault.kind}: waited {fault.wait:.1f} s, {len(fault.in_progress)} pages in progress")
    return fault


def _until_a_page_is_read(chaos: ChaosService) -> None:
    since = event_log.now()
    chaos.service.programs.wait_until(
        lambda: event_log.pages_read_since(since),
        "a page is read between two faults",
        _LIMIT_SECONDS,
    )


def _report(
    name: str, chaos: ChaosService, seed: int, injected: list[Fault], above: dict[str, int]
) -> None:
    lines = outcome_check.table_rows(injected, above)
    documents, pages = len(chaos.documents), sum(document.scanned for document in chaos.documents)
    requests, lease = len(chaos.ocr.requests), get_settings().lease.seconds
    seconds = time.monotonic() - chaos.started
    outcome_check.print_table(
        f"{name}: {documents} documents, {pages} pages to read, {requests} requests, "
        f"lease {lease:g} s, {seconds:.0f} s, seed {seed}",
        lines,
    )
    figures = {
        "seed": seed, "seconds": round(seconds), "lease_seconds": lease,
        "round_seconds": get_settings().maintenance.interval,
        "documents": documents, "pages": pages, "requests": requests,
        "kinds": [asdict(line) for line in lines],
    }  # fmt: skip
    outcome_check.save_figures(name, figures)
