"""The kinds of faults, each in the middle of work, and what each of them cost.

A victim is frozen for a moment before it is killed, so that what it had in hand can be counted
exactly. Used by the chaos tests.
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
from rag_service.jobs import wake_ups
from tests.chaos import witness
from tests.chaos.rig import OCR_PLACES, Fed, Rig
from tests.chaos.witness import Claim, Holding
from tests.processes import Program, is_alive, kill

T = TypeVar("T")
_SOON = 0.02
_PATIENCE = 90.0
# Documents of which prepare stores pages before it has planned all of them.
_NATIVE = 180


@dataclass
class Fault:
    """One fault: when, what it hit, and what came of it."""

    kind: str
    at: datetime
    # Runs whose holder was hit, and runs that were merely under way.
    hit: list[Claim] = field(default_factory=list)
    under_way: list[Claim] = field(default_factory=list)
    # Pages that were out at the OCR server in the hands of the victim: (document id, number).
    in_hand: list[tuple[str, int]] = field(default_factory=list)
    # Whether what was killed runs again, and how long that took; None: nothing has to.
    is_back: Callable[[], bool] | None = None
    back_after: float = 0.0
    # Whether nothing else could do its work meanwhile.
    was_alone: bool = False
    wait: float = 0.0

    def waits(self) -> list[float] | None:
        """How long each run waited; None while one of them waits still."""
        hit = [witness.seconds_until_claimed(claim, self.at) for claim in self.hit]
        others = [witness.seconds_until_moved(claim, self.at) for claim in self.under_way]
        waits = [*hit, *others]
        return None if None in waits else [wait for wait in waits if wait is not None]


Kind = Callable[[Rig], Fault]


def kill_ocr_fork(rig: Rig) -> Fault:
    """SIGKILL of one fork that has pages out."""

    def attempt() -> Fault | None:
        requests = [r for r in list(rig.ocr.requests) if r.ended is None and r.mark]
        if not requests:
            return None
        request = rig.random.choice(requests)
        assert request.mark is not None
        # The fork may be done by now, and the document may be too new to be in the list.
        with suppress(AssertionError, StopIteration):
            pid = rig.service.programs.fork_at(request.client_port)
            document_id = rig.fed_as(request.mark.document).id
            return _freeze_fork(pid, document_id)
        return None

    return _until(attempt, "a fork is in the middle of a document", rig)


def _freeze_fork(pid: int, document_id: str) -> Fault | None:
    _freeze([pid])
    holding = witness.held_of(document_id)
    if holding is None or not _in_the_middle(holding):
        os.kill(pid, signal.SIGCONT)
        return None
    fault = _hit("OCR fork killed", [holding])
    kill(pid)
    return fault


def kill_ocr_worker(rig: Rig) -> Fault:
    """SIGKILL of an ocr worker's main process; what is left of it is ended by its keeper."""
    place, fault = _freeze_worker(rig, "ocr worker killed")
    _kill_kept(rig, place, fault, witness.worker_is_back)
    return fault


def stop_ocr_worker(rig: Rig) -> Fault:
    """SIGSTOP of an ocr worker with all its forks for longer than its leases, then SIGCONT."""
    place, fault = _freeze_worker(rig, "ocr worker stopped past its lease")
    settings = get_settings()
    released = settings.lease.seconds + settings.maintenance.interval
    time.sleep(released + rig.random.uniform(0.5, 3))
    os.killpg(rig.keeper.at(place).pid, signal.SIGCONT)
    return fault


def _kill_kept(rig: Rig, place: str, fault: Fault, is_back: Callable[[int], bool]) -> None:
    """Kill a kept program; the fault is over when the next one in its place works."""
    old = rig.keeper.at(place).pid

    def next_works() -> bool:
        pid = rig.keeper.at(place).pid
        return pid != old and is_back(pid)

    fault.is_back, fault.was_alone = next_works, place not in OCR_PLACES
    kill(old)


def _freeze_worker(rig: Rig, kind: str) -> tuple[str, Fault]:
    def attempt() -> tuple[str, Fault] | None:
        place = rig.random.choice(OCR_PLACES)
        program = rig.keeper.at(place)
        holdings = witness.held_by(program.pid)
        if not any(map(_in_the_middle, holdings)):
            return None
        _freeze([program.pid, *program.forks()])
        holdings = witness.held_by(program.pid)
        if any(map(_in_the_middle, holdings)) and not any(h.blamed for h in holdings):
            return place, _hit(kind, holdings)
        os.killpg(program.pid, signal.SIGCONT)
        return None

    return _until(attempt, "an ocr worker is in the middle of a document", rig)


def kill_prepare_worker(rig: Rig) -> Fault:
    """SIGKILL of the prepare worker while some pages are planned and stored and others not."""
    _, holdings = _freeze_prepare(rig)
    fault = _hit("prepare worker killed", holdings)
    _kill_kept(rig, "prepare", fault, witness.worker_is_back)
    return fault


def kill_prepare_forks(rig: Rig) -> Fault:
    """SIGKILL of the prepare worker's forks; its main process lives."""
    program, holdings = _freeze_prepare(rig)
    fault = _hit("prepare forks killed", holdings)
    for pid in program.forks():
        kill(pid)
    os.kill(program.pid, signal.SIGCONT)
    return fault


def _freeze_prepare(rig: Rig) -> tuple[Program, list[Holding]]:
    def attempt() -> tuple[Program, list[Holding]] | None:
        fed = rig.feed(rig.random.randint(1, 4), _NATIVE, priority="interactive")
        if not _wait_for_plan(rig, fed):
            return None
        time.sleep(rig.random.uniform(0, 0.2))
        program = rig.keeper.at("prepare")
        _freeze([program.pid, *program.forks()])
        holdings = witness.held_by(program.pid)
        mine = [h for h in holdings if h.document_id == fed.id and h.done + h.pending < fed.pages]
        if mine and not any(h.blamed for h in holdings):
            return program, holdings
        os.killpg(program.pid, signal.SIGCONT)
        return None

    return _until(attempt, "prepare is in the middle of a document", rig)


def _wait_for_plan(rig: Rig, fed: Fed) -> bool:
    """True once some of the document's pages are stored and prepare still works on it."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        holding = witness.held_of(fed.id)
        if holding is not None and holding.done:
            return holding.state == "preparing"
        time.sleep(_SOON)
    return False


def kill_maintenance(rig: Rig) -> Fault:
    """SIGKILL of maintenance as new documents come in."""
    _feed_some(rig)
    fault = _under_way("maintenance killed")
    _kill_kept(rig, "maintenance", fault, witness.maintenance_is_back)
    return fault


def empty_broker(rig: Rig) -> Fault:
    """FLUSHALL while doorbells wait in the queues and at the workers."""
    _broker_pid(rig)
    _feed_some(rig)
    with redis.Redis.from_url(_broker_url()) as client:
        client.flushall()
    return _under_way("broker emptied")


def restart_broker(rig: Rig) -> Fault:
    """SIGKILL of the broker, which is started again on its port; documents come in meanwhile."""
    pid = _broker_pid(rig)
    _feed_some(rig)
    kill(pid)
    fault = _under_way("broker killed and started again")
    fault.is_back, fault.was_alone = lambda: wake_ups.ping(get_settings()) is None, True
    _feed_some(rig)
    return fault


def _broker_pid(rig: Rig) -> int:
    """The broker's process, once it has come back from an earlier fault."""

    def serving() -> int | None:
        return rig.server_pid("valkey") if wake_ups.ping(get_settings()) is None else None

    return _until(serving, "the broker serves", rig)


def _feed_some(rig: Rig) -> None:
    for _ in range(rig.random.randint(2, 4)):
        rig.feed(rig.random.randint(2, 6))


def _broker_url() -> str:
    url = get_settings().redis.url
    assert url is not None
    return url.get_secret_value()


def _in_the_middle(holding: Holding) -> bool:
    """Some pages are read, some are not, and no earlier fault is held against the run."""
    return holding.state == "ocr" and min(holding.pending, holding.done) > 0 == holding.blamed


def _hit(kind: str, holdings: Sequence[Holding]) -> Fault:
    hit = [holding.claim for holding in holdings]
    return Fault(kind, witness.now(), hit=hit, in_hand=witness.in_hand(hit))


def all_hit(kind: str) -> Fault:
    """A fault that hits every run that is held."""
    return _hit(kind, witness.held())


def _under_way(kind: str) -> Fault:
    return Fault(kind, witness.now(), under_way=witness.unfinished())


def _freeze(pids: Sequence[int]) -> None:
    """SIGSTOP, and wait until the kernel has stopped each of them."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            while is_alive(pid) and psutil.Process(pid).status() != psutil.STATUS_STOPPED:
                time.sleep(0.001)


def _until(attempt: Callable[[], T | None], what: str, rig: Rig) -> T:
    deadline = time.monotonic() + _PATIENCE
    while (value := attempt()) is None:
        assert time.monotonic() < deadline, f"Not in time: {what}\n{rig.service.programs.tails()}"
        time.sleep(rig.random.uniform(_SOON, 3 * _SOON))
    return value
