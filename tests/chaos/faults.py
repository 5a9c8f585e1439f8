"""The kinds of faults, each injected in the middle of work, and the cost of each fault.

A process is suspended for a moment before it is killed, so that its pages in progress can be
counted exactly.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

import psutil
import redis

from rag_service.config.loader import get_settings
from rag_service.database.engine import get_engine
from rag_service.jobs import wake_ups
from tests.chaos import event_log
from tests.chaos.chaos_service import OCR_WORKERS, ChaosDocument, ChaosService
from tests.chaos.event_log import Claim, ClaimedRun
from tests.fakes import ocr_server
from tests.fakes.scans import Mark
from tests.postgres_modes import read_only
from tests.processes import Program, is_alive, kill

T = TypeVar("T")
_SOON = 0.02
_LIMIT_SECONDS = 180.0
# Shorter than a lease.
_OUTAGE_SECONDS = (1.0, 4.0)
_DECLINED = "I'm sorry, but I can't assist with that image."
# Native pages of a document that prepare stores in several transactions.
_NATIVE = 180


@dataclass
class Fault:
    """One fault: its time, the runs that it hit, and its cost."""

    kind: str
    at: datetime
    # Runs whose worker was hit, and other runs that had not ended.
    hit: list[Claim] = field(default_factory=list)
    unfinished_runs: list[Claim] = field(default_factory=list)
    # Pages of these runs that were at the OCR server: (document ID, number).
    in_progress: list[tuple[str, int]] = field(default_factory=list)
    # Whether the killed program works again, and how long that took; None: none was killed.
    is_back: Callable[[], bool] | None = None
    back_after: float = 0.0
    # Whether no other program could do its work meanwhile.
    was_alone: bool = False
    wait: float = 0.0

    def waits(self) -> list[float] | None:
        """Return how long each run waited, or None while one of them still waits."""
        hit = [event_log.seconds_until_claimed(claim, self.at) for claim in self.hit]
        others = [event_log.seconds_until_moved(claim, self.at) for claim in self.unfinished_runs]
        waits = [*hit, *others]
        return None if None in waits else [wait for wait in waits if wait is not None]


Kind = Callable[[ChaosService], Fault]


def kill_ocr_fork(chaos: ChaosService) -> Fault:
    """SIGKILL of one fork that has sent pages."""

    def attempt() -> Fault | None:
        requests = [r for r in list(chaos.ocr.requests) if r.ended is None and r.mark]
        if not requests:
            return None
        request = chaos.random.choice(requests)
        assert request.mark is not None
        # The fork may be done already, and the document may not be in the list yet.
        with suppress(AssertionError, StopIteration):
            pid = chaos.service.programs.fork_at(request.client_port)
            document_id = chaos.document_with_mark(request.mark.document).id
            return _suspend_fork(pid, document_id)
        return None

    return _until(attempt, "a fork is in the middle of a document", chaos)


def _suspend_fork(pid: int, document_id: str) -> Fault | None:
    _suspend([pid])
    run = event_log.claimed_run_of(document_id)
    if run is None or not _in_the_middle(run):
        os.kill(pid, signal.SIGCONT)
        return None
    fault = _hit("OCR fork killed", [run])
    kill(pid)
    return fault


def kill_ocr_worker(chaos: ChaosService) -> Fault:
    """SIGKILL of an ocr worker's main process; its restarter kills what is left of it."""
    name, fault = _suspend_worker(chaos, "ocr worker killed")
    _kill_program(chaos, name, fault, event_log.worker_is_back)
    return fault


def stop_ocr_worker(chaos: ChaosService) -> Fault:
    """SIGSTOP of an ocr worker with all its forks for longer than its leases, then SIGCONT."""
    name, fault = _suspend_worker(chaos, "ocr worker stopped past its lease")
    settings = get_settings()
    released = settings.lease.seconds + settings.maintenance.interval
    time.sleep(released + chaos.random.uniform(0.5, 3))
    os.killpg(chaos.restarter.program(name).pid, signal.SIGCONT)
    return fault


def _kill_program(
    chaos: ChaosService, name: str, fault: Fault, is_back: Callable[[int], bool]
) -> None:
    """Kill a program; the fault is over when its replacement works."""
    old = chaos.restarter.program(name).pid

    def next_works() -> bool:
        pid = chaos.restarter.program(name).pid
        return pid != old and is_back(pid)

    fault.is_back, fault.was_alone = next_works, name not in OCR_WORKERS
    kill(old)


def _suspend_worker(chaos: ChaosService, kind: str) -> tuple[str, Fault]:
    def attempt() -> tuple[str, Fault] | None:
        name = chaos.random.choice(OCR_WORKERS)
        program = chaos.restarter.program(name)
        claimed = event_log.runs_of_worker(program.pid)
        if not any(map(_in_the_middle, claimed)):
            return None
        _suspend([program.pid, *program.forks()])
        claimed = event_log.runs_of_worker(program.pid)
        if any(map(_in_the_middle, claimed)) and not any(h.blamed for h in claimed):
            return name, _hit(kind, claimed)
        os.killpg(program.pid, signal.SIGCONT)
        return None

    return _until(attempt, "an ocr worker is in the middle of a document", chaos)


def kill_prepare_worker(chaos: ChaosService) -> Fault:
    """SIGKILL of the prepare worker when it has stored only some of the pages."""
    _, claimed = _suspend_prepare(chaos)
    fault = _hit("prepare worker killed", claimed)
    _kill_program(chaos, "prepare", fault, event_log.worker_is_back)
    return fault


def kill_prepare_forks(chaos: ChaosService) -> Fault:
    """SIGKILL of the prepare worker's forks; its main process stays."""
    program, claimed = _suspend_prepare(chaos)
    fault = _hit("prepare forks killed", claimed)
    for pid in program.forks():
        kill(pid)
    os.kill(program.pid, signal.SIGCONT)
    return fault


def _suspend_prepare(chaos: ChaosService) -> tuple[Program, list[ClaimedRun]]:
    def attempt() -> tuple[Program, list[ClaimedRun]] | None:
        document = chaos.add_document(chaos.random.randint(1, 4), _NATIVE, priority="interactive")
        if not _wait_for_plan(chaos, document):
            return None
        time.sleep(chaos.random.uniform(0, 0.2))
        program = chaos.restarter.program("prepare")
        _suspend([program.pid, *program.forks()])
        claimed = event_log.runs_of_worker(program.pid)
        own = [
            h
            for h in claimed
            if h.document_id == document.id and h.done + h.pending < document.pages
        ]
        if own and not any(h.blamed for h in claimed):
            return program, claimed
        os.killpg(program.pid, signal.SIGCONT)
        return None

    return _until(attempt, "prepare is in the middle of a document", chaos)


def _wait_for_plan(chaos: ChaosService, document: ChaosDocument) -> bool:
    """Wait until pages are stored; return whether prepare still works on the document."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    while time.monotonic() < deadline:
        run = event_log.claimed_run_of(document.id)
        if run is not None and run.done:
            return run.state == "preparing"
        time.sleep(_SOON)
    return False


def kill_maintenance(chaos: ChaosService) -> Fault:
    """SIGKILL of maintenance after new documents were added."""
    _add_some_documents(chaos)
    fault = _fault_during("maintenance killed")
    _kill_program(chaos, "maintenance", fault, event_log.maintenance_is_back)
    return fault


def empty_broker(chaos: ChaosService) -> Fault:
    """FLUSHALL while wake-up messages wait in the queues and at the workers."""
    _broker_pid(chaos)
    _add_some_documents(chaos)
    with redis.Redis.from_url(_broker_url()) as client:
        client.flushall()
    return _fault_during("broker emptied")


def restart_broker(chaos: ChaosService) -> Fault:
    """SIGKILL of the broker, which is restarted on its port; documents are added meanwhile."""
    pid = _broker_pid(chaos)
    _add_some_documents(chaos)
    kill(pid)
    fault = _fault_during("broker killed and restarted")
    fault.is_back, fault.was_alone = lambda: wake_ups.ping(get_settings()) is None, True
    _add_some_documents(chaos)
    return fault


def unmount_store(chaos: ChaosService) -> Fault:
    """Move the folder of the document store elsewhere and back; documents are added before."""
    _add_some_documents(chaos)
    folder = get_settings().data_dir / "documents"
    elsewhere = folder.with_name("documents-elsewhere")
    folder.rename(elsewhere)
    try:
        time.sleep(chaos.random.uniform(*_OUTAGE_SECONDS))
        assert not folder.exists(), "somebody made the missing folder"
    finally:
        elsewhere.rename(folder)
    return _fault_during("document store unmounted")


def make_database_read_only(chaos: ChaosService) -> Fault:
    """Make PostgreSQL refuse all writes for a moment, as after a failover."""
    _add_some_documents(chaos)
    with read_only(get_engine().url.render_as_string(hide_password=False)):
        time.sleep(chaos.random.uniform(*_OUTAGE_SECONDS))
    return _fault_during("database read-only")


def refuse_every_page(chaos: ChaosService) -> Fault:
    """Let the OCR server answer every page with 400, as one that takes no pictures."""
    return _break_ocr_server(chaos, "every page refused", ocr_server.refusal(400, "No pictures."))


def fail_every_page(chaos: ChaosService) -> Fault:
    """Let the OCR server answer every page with 500, as one without GPU memory."""
    reply = ocr_server.refusal(500, "CUDA out of memory")
    return _break_ocr_server(chaos, "every page fails", reply)


def decline_every_page(chaos: ChaosService) -> Fault:
    """Let the model answer every page with nothing, a loop or a refusal."""
    replies = [ocr_server.EMPTY, ocr_server.LOOP, ocr_server.Reply(text=_DECLINED)]
    return _break_ocr_server(chaos, "no page read", chaos.random.choice(replies))


def _break_ocr_server(chaos: ChaosService, kind: str, reply: ocr_server.Reply) -> Fault:
    """Give every page this reply until the outage is found, and a moment more."""
    ocr, usual = chaos.ocr, (chaos.ocr.default, chaos.ocr.on_request)
    asked: list[Mark] = []

    def break_one(request: ocr_server.Request) -> None:
        ocr.default = reply
        if request.mark is not None:
            asked.append(request.mark)

    # Their requests are closed when another page of the run finds the outage.
    at_server = event_log.pages_in_progress(event_log.unfinished())
    ocr.on_request, ocr.default = break_one, reply
    _add_some_documents(chaos)
    _until(lambda: _is_out(chaos) or None, "the outage is found", chaos)
    time.sleep(chaos.random.uniform(*_OUTAGE_SECONDS))
    fault = _fault_during(kind)
    at_server += event_log.pages_in_progress(fault.unfinished_runs)
    ocr.default, ocr.on_request = usual
    sent = [(chaos.document_with_mark(mark.document).id, mark.page) for mark in asked]
    fault.in_progress = [*at_server, *sent]
    fault.is_back, fault.was_alone = lambda: not _is_out(chaos), True
    return fault


def _is_out(chaos: ChaosService) -> bool:
    return chaos.service.server_state() not in (None, "up")


def _broker_pid(chaos: ChaosService) -> int:
    """Return the broker's process ID when it works again after an earlier fault."""

    def serving() -> int | None:
        return chaos.server_pid("valkey") if wake_ups.ping(get_settings()) is None else None

    return _until(serving, "the broker answers", chaos)


def _add_some_documents(chaos: ChaosService) -> None:
    for _ in range(chaos.random.randint(2, 4)):
        chaos.add_document(chaos.random.randint(2, 6))


def _broker_url() -> str:
    url = get_settings().redis.url
    assert url is not None
    return url.get_secret_value()


def _in_the_middle(run: ClaimedRun) -> bool:
    """Return whether some pages are read, some are not, and no earlier fault was counted."""
    return run.state == "ocr" and min(run.pending, run.done) > 0 == run.blamed


def _hit(kind: str, claimed: Sequence[ClaimedRun]) -> Fault:
    hit = [run.claim for run in claimed]
    return Fault(kind, event_log.now(), hit=hit, in_progress=event_log.pages_in_progress(hit))


def all_hit(kind: str) -> Fault:
    """Return a fault that hits every claimed run."""
    return _hit(kind, event_log.claimed_runs())


def _fault_during(kind: str) -> Fault:
    return Fault(kind, event_log.now(), unfinished_runs=event_log.unfinished())


def _suspend(pids: Sequence[int]) -> None:
    """Send SIGSTOP and wait until the kernel has stopped each process."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            while is_alive(pid) and psutil.Process(pid).status() != psutil.STATUS_STOPPED:
                time.sleep(0.001)


def _until(attempt: Callable[[], T | None], what: str, chaos: ChaosService) -> T:
    deadline = time.monotonic() + _LIMIT_SECONDS
    while (value := attempt()) is None:
        assert time.monotonic() < deadline, (
            f"Not within {_LIMIT_SECONDS:g} s: {what}\n{chaos.service.programs.tails()}"
        )
        time.sleep(chaos.random.uniform(_SOON, 3 * _SOON))
    return value
