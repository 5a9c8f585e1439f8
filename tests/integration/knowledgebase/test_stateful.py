"""Random sequences of steps by users, workers and maintenance keep the database consistent.

Several workers, some with lost leases, execute random steps on a real database; after each step
the rules must hold, and at the end every document has its final record.
"""

import uuid
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import settings as bounded
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rag_service.database import document_rows, totals
from rag_service.database.engine import begin
from rag_service.errors import AlreadyActive, Cancelled, Internal, LeaseLost, NotFound
from rag_service.jobs import leases, run_pages, runs
from rag_service.states import GOOD, HELD, TERMINAL, PageState, Priority, RunState, Stage
from tests import simulation as sim
from tests.derived_status import assert_stored_agrees_with_derived

WORKERS = {"small": 2, "large": 4}
PAGES = st.lists(
    st.sampled_from([PageState.PENDING, PageState.NATIVE, PageState.BLANK, PageState.FAILED]),
    min_size=1,
    max_size=4,
)
READ = st.sampled_from([PageState.OCR, PageState.NO_TEXT, PageState.TRUNCATED, PageState.FAILED])
ANY = st.integers(0, 1_000_000)
COUNT_LIMIT = 3


def settled(page):
    """Return the page's columns except the epoch of the claim that last sent it."""
    return {name: value for name, value in page._mapping.items() if name != "hand_epoch"}


class Knowledgebase(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        sim.execute("TRUNCATE documents, totals, total_changes CASCADE")
        self.claims = []
        self.documents = []
        self.seen_runs = {}
        self.seen_pages = {}
        self.before = sim.everything()
        self.lease = sim.lease(seconds=0.001, crash_limit=COUNT_LIMIT, expiry_limit=COUNT_LIMIT)

    def claim_of(self, index):
        """Return any of the last claims, most of which are still valid."""
        return self.claims[-1 - index % min(len(self.claims), 6)]

    def document_of(self, index):
        return self.documents[index % len(self.documents)]

    def row(self, run):
        """Return the run's row before this step, or None if it was removed."""
        return next((row for row in self.before["runs"] if row.id == run.id), None)

    def is_valid(self, run):
        row = self.row(run)
        return row is not None and row.epoch == run.epoch and row.state in HELD

    def write(self, run, action):
        """Check that a write succeeds under a valid lease and else changes nothing."""
        if self.is_valid(run):
            action()
            return
        try:
            action()
        except LeaseLost:
            assert sim.everything() == self.before, "a stale write changed something"
        else:
            raise AssertionError("a stale write raised nothing")

    @rule(urgent=st.booleans())
    def add_document(self, urgent):
        priority = Priority.INTERACTIVE if urgent else Priority.BULK
        self.documents.append(sim.add_document(priority))

    @rule(stage=st.sampled_from(list(Stage)), worker=st.sampled_from(list(WORKERS)))
    def claim(self, stage, worker):
        expected = self.best(stage, worker)
        run = sim.try_claim(stage, worker, forks=WORKERS[worker])
        assert (run and run.id) == expected
        if run is not None:
            self.claims.append(run)

    def best(self, stage, worker):
        """Return the run that the claim must return, computed in Python."""
        held = [run for run in self.before["runs"] if run.lease_worker == worker]
        bulk = sum(run.priority == Priority.BULK for run in held)
        waiting = [
            (run.priority, run.queued_at, run.id)
            for run in self.before["runs"]
            if run.state == stage.waiting
            and (run.priority < Priority.BULK or bulk < WORKERS[worker] - 1)
        ]
        return min(waiting)[2] if waiting else None

    @precondition(lambda self: self.claims)
    @rule(index=ANY, states=PAGES)
    def plan(self, index, states):
        run = self.claim_of(index)
        self.write(run, lambda: sim.plan(run, *states))

    @precondition(lambda self: self.claims)
    @rule(index=ANY)
    def reuse(self, index):
        run = self.claim_of(index)
        self.write(run, lambda: run_pages.reuse(run))

    @precondition(lambda self: self.claims)
    @rule(index=ANY)
    def hand_to_ocr(self, index):
        run = self.claim_of(index)
        self.write(run, lambda: runs.hand_to_ocr(run))

    @precondition(lambda self: self.claims)
    @rule(index=ANY, number=st.integers(1, 4))
    def mark_in_progress(self, index, number):
        run = self.claim_of(index)
        self.write(run, lambda: run_pages.mark_in_progress(run, number))

    @precondition(lambda self: self.claims)
    @rule(index=ANY, number=st.integers(1, 4), state=READ, later=st.booleans())
    def store(self, index, number, state, later):
        run = self.claim_of(index)
        more = {"retry_in": 0.001} if later else {}
        self.write(run, lambda: sim.read(run, number, state, **more))

    @precondition(lambda self: self.claims)
    @rule(index=ANY)
    def finish(self, index):
        run = self.claim_of(index)
        if not self.is_valid(run) or (sim.planned_numbers(run) and not run_pages.pending(run)):
            self.write(run, lambda: runs.finish(run))

    @precondition(lambda self: self.claims)
    @rule(index=ANY)
    def fail(self, index):
        run = self.claim_of(index)
        self.write(run, lambda: runs.fail(run, Internal()))

    @precondition(lambda self: self.claims)
    @rule(index=ANY)
    def release(self, index):
        run = self.claim_of(index)
        stands = self.is_valid(run)
        assert leases.release(run) == stands
        assert stands or sim.everything() == self.before

    @precondition(lambda self: self.claims)
    @rule(index=ANY)
    def crash(self, index):
        run = self.claim_of(index)
        row = self.row(run)
        if row is not None and row.lease_worker:
            assert leases.release_crashed(row.lease_worker, row.lease_task, self.lease)
            assert sim.run_row(run.id).crashes == row.crashes + 1

    @precondition(lambda self: self.claims)
    @rule(index=ANY)
    def expire(self, index):
        run = self.claim_of(index)
        if self.is_valid(run):
            sim.outlast(run.id)
            assert leases.release_expired(self.lease) >= 1
            assert not leases.is_valid(run)

    @rule(worker=st.sampled_from(list(WORKERS)))
    def stop_worker(self, worker):
        leases.release_worker(worker)
        assert not sim.rows("SELECT 1 FROM runs WHERE lease_worker = :w", w=worker)

    @precondition(lambda self: self.documents)
    @rule(index=ANY)
    def cancel(self, index):
        with begin() as connection:
            runs.cancel(connection, self.document_of(index), Cancelled())

    @precondition(lambda self: self.documents)
    @rule(index=ANY)
    def reprocess(self, index):
        try:
            sim.add_run(self.document_of(index))
        except AlreadyActive:
            assert sim.newest_run(self.document_of(index)).state not in TERMINAL
        except NotFound:
            raise AssertionError("an undeleted document was not found") from None

    @precondition(lambda self: self.documents)
    @rule(index=ANY, hidden_only=st.booleans())
    def delete(self, index, hidden_only):
        document_id = self.documents.pop(index % len(self.documents))
        with begin() as connection:
            assert document_rows.mark_deleted(connection, document_id)
        if not hidden_only:
            with begin() as connection:
                document_rows.remove(connection, document_id)

    @rule()
    def add_changes(self):
        totals.add_changes()

    @invariant()
    def the_rules_hold(self):
        self.before = sim.everything()
        self.at_most_one_run_of_a_document_is_active()
        self.ended_runs_stay_and_epochs_only_grow()
        self.done_pages_never_change()
        self.a_run_is_held_or_it_is_not()
        self.bulk_never_holds_the_reserved_fork()
        self.the_current_run_is_the_right_one()
        assert_stored_agrees_with_derived()

    def at_most_one_run_of_a_document_is_active(self):
        active = [run.document_id for run in self.before["runs"] if run.state not in TERMINAL]
        assert len(active) == len(set(active))

    def ended_runs_stay_and_epochs_only_grow(self):
        for run in self.before["runs"]:
            old = self.seen_runs.get(run.id)
            if old is not None:
                assert run.epoch >= old.epoch
                assert old.state not in TERMINAL or run == old
            self.seen_runs[run.id] = run

    def done_pages_never_change(self):
        for page in self.before["pages"]:
            old = self.seen_pages.get((page.run_id, page.number))
            done = old is not None and old.state != PageState.PENDING
            assert not done or settled(page) == settled(old)
            self.seen_pages[page.run_id, page.number] = page

    def a_run_is_held_or_it_is_not(self):
        for run in self.before["runs"]:
            held = run.state in HELD
            claim = (run.lease_worker, run.lease_task, run.lease_expires_at, run.held_since)
            assert all((column is not None) == held for column in claim)
            assert (run.finished_at is not None) == (run.state in TERMINAL)
            assert (run.error_code is not None) == (run.state in ("failed", "cancelled"))
            assert run.state in TERMINAL or max(run.crashes, run.expiries) < COUNT_LIMIT

    def bulk_never_holds_the_reserved_fork(self):
        for worker, forks in WORKERS.items():
            held = [run for run in self.before["runs"] if run.lease_worker == worker]
            assert len([run for run in held if run.priority == Priority.BULK]) <= forks - 1

    def the_current_run_is_the_right_one(self):
        good = Counter(page.run_id for page in self.before["pages"] if page.state in GOOD)
        for document in self.before["documents"]:
            own = [run for run in self.before["runs"] if run.document_id == document.id]
            processed = [run for run in own if run.state == RunState.PROCESSED]
            failed = [run for run in own if run.state == RunState.FAILED]
            best = None
            if processed:
                best = max(processed, key=lambda run: run.number).id
            elif failed:
                best = max(failed, key=lambda run: (good[run.id], run.number)).id
            assert document.current_run_id == best

    def teardown(self):
        """Let workers finish all work; every document must get its final record."""
        for worker in WORKERS:
            leases.release_worker(worker)
        sim.execute("UPDATE runs SET retry_at = NULL WHERE state <> ALL(:t)", t=list(TERMINAL))
        sim.execute("UPDATE pages SET retry_at = NULL WHERE state = 'pending'")
        for stage in Stage:
            while run := sim.try_claim(stage, uuid.uuid4().hex):
                self.work_off(stage, run)
        for document_id in self.documents:
            assert sim.newest_run(document_id).state in TERMINAL
        self.the_rules_hold()

    def work_off(self, stage, run):
        if not sim.planned_numbers(run):
            sim.plan(run, PageState.NATIVE, PageState.PENDING)
        waiting = run_pages.pending(run)
        if waiting and stage is Stage.PREPARE:
            runs.hand_to_ocr(run)
            return
        for page in waiting:
            sim.read(run, page.number)
        assert runs.finish(run) in (RunState.PROCESSED, RunState.FAILED)


@pytest.mark.timeout(300)
def test_random_steps_keep_the_rules(settings):
    run_state_machine_as_test(
        Knowledgebase,
        settings=bounded(
            max_examples=25,
            stateful_step_count=40,
            deadline=None,
            # Shrinking with a real database takes minutes; the failed steps are printed anyway.
            phases=[Phase.explicit, Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
