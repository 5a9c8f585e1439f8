"""A process in trouble fails no document: it gives its run back and ends."""

import os
import resource
from pathlib import Path

import psutil
import pytest
from sqlalchemy import text

from rag_service.config.loader import get_settings
from rag_service.database.engine import begin
from rag_service.monitoring import readiness
from tests.fakes import refused_threads
from tests.fakes.scans import new_number, scan
from tests.processes import kill, suspended
from tests.service import Scan, open_service

_FORKS, _LATER = 4, 12

# The pages of a document of this name meet an error that nothing expects, in every fork.
_SPOIL = """
CREATE FUNCTION spoil() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (
        SELECT FROM runs JOIN documents ON documents.id = document_id
        WHERE runs.id = NEW.run_id AND filename = 'spoilt.pdf'
    ) THEN
        RAISE 'nonsense';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER spoil BEFORE INSERT ON pages FOR EACH ROW EXECUTE FUNCTION spoil();
"""


@pytest.fixture(scope="module")
def service(stack, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sick")
    scratch, refused = folder / "scratch", folder / "refused"
    scratch.mkdir()
    refused.mkdir()
    path = os.pathsep.join([*refused_threads.__path__, os.environ.get("PYTHONPATH", "")])
    variables = {
        "PYTHONPATH": path.rstrip(os.pathsep),
        "REFUSED_THREADS": str(refused),
        "TMPDIR": str(scratch),
    }
    with open_service(stack, folder, **variables) as service:
        with begin() as connection:
            connection.execute(text(_SPOIL))
        service.scratch, service.refused = scratch, refused
        service.programs.start_maintenance()
        service.workers = {
            stage: service.programs.start_worker(stage, _FORKS) for stage in ("prepare", "ocr")
        }
        service.programs.wait_ready(*service.workers.values())
        yield service


def limit(pid, name, most):
    _, hard = resource.prlimit(pid, name)
    resource.prlimit(pid, name, (most, hard))


def limit_descriptors(pid, _):
    limit(pid, resource.RLIMIT_NOFILE, 5)


def limit_memory(pid, _):
    limit(pid, resource.RLIMIT_AS, psutil.Process(pid).memory_info().vms + (1 << 20))


def limit_files(pid, _):
    """Let it write no file longer than a few bytes, as on a full disk."""
    limit(pid, resource.RLIMIT_FSIZE, 4096)


def refuse_threads(pid, service):
    Path(service.refused, str(pid)).touch()


KINDS = [limit_descriptors, limit_memory, limit_files, refuse_threads]


@pytest.mark.parametrize("make_sick", KINDS)
def test_a_sick_fork_ends_and_fails_no_document(service, make_sick):
    """One fork of each worker. They have worked before, so they have connections and threads."""
    warm = [Scan(service, 1) for _ in range(_FORKS)]
    assert [one.ended().status for one in warm] == ["processed"] * _FORKS
    forks = [worker.forks() for worker in service.workers.values()]
    sick = [first for first, *_ in forks]
    for pid in sick:
        make_sick(pid, service)
    # While the others stand still, the sick ones get messages.
    with suspended(*(pid for _, *healthy in forks for pid in healthy)):
        scans = [Scan(service, 2) for _ in range(_LATER)]
        service.programs.wait_until(
            lambda: not any(map(psutil.pid_exists, sick)), "the sick forks have ended"
        )
    assert [one.ended().status for one in scans] == ["processed"] * _LATER
    assert [one.charges() for one in scans] == [(0, 0, 0)] * _LATER
    for worker in service.workers.values():
        assert "This process ends, another takes its place: no " in worker.text


def test_a_document_with_an_unexpected_error_ends_by_name_and_costs_no_other(service):
    spoilt = service.add(scan(new_number(), 1), "spoilt.pdf")
    others = [Scan(service, 2) for _ in range(_LATER)]
    view = service.wait_for(spoilt)
    assert (view.status, view.error.code) == ("failed", "worker_crashed")
    assert "nonsense" in view.error.message
    assert service.run(spoilt).crashes == 3
    assert [one.ended().status for one in others] == ["processed"] * _LATER
    assert [one.charges() for one in others] == [(0, 0, 0)] * _LATER


def test_a_worker_whose_forks_are_all_sick_pauses_and_says_so(service):
    """Its main process has no memory left, and so has every fork."""
    worker = service.workers["prepare"]
    pids = [worker.pid, *worker.forks()]
    for pid in pids:
        limit_memory(pid, service)
    scans = [Scan(service, 2) for _ in range(_LATER)]
    settings = get_settings()

    def is_degraded():
        return [fault for fault in readiness.processing_faults(settings) if "no free" in str(fault)]

    [fault] = service.programs.wait_until(is_degraded, "health says it")
    assert fault.name == "prepare_worker"
    assert "processes in a row ended without a result, the last: no free memory" in fault.message
    assert {service.view(one.id).waiting_for for one in scans} == {"worker"}
    assert "none claims a run for" in worker.text
    for pid in (worker.pid, *worker.forks()):
        limit(pid, resource.RLIMIT_AS, resource.RLIM_INFINITY)
    assert [one.ended().status for one in scans] == ["processed"] * _LATER
    assert [one.charges() for one in scans] == [(0, 0, 0)] * _LATER
    service.programs.wait_until(lambda: not is_degraded(), "health is well again")


def test_killed_render_children_do_not_stay_as_zombies(service):
    """Of an idle fork, and of a fork that is killed with it."""
    assert [Scan(service, 1).ended().status for _ in range(4)] == ["processed"] * 4
    worker = service.workers["prepare"]

    def render_children():
        return {pid for pid in worker.family() if pid not in worker.forks()}

    def reaped(pids):
        return not any(map(psutil.pid_exists, pids))

    fork = next(pid for pid in worker.forks() if psutil.Process(pid).children())
    [child] = psutil.Process(fork).children()
    child.kill()
    service.programs.wait_until(lambda: reaped([child.pid]), "an idle fork reaps its child")
    assert Scan(service, 1).ended().status == "processed"
    orphans = render_children()
    for pid in worker.forks():
        kill(pid)
    service.programs.wait_until(lambda: reaped(orphans), "the main process reaps orphans")
    assert Scan(service, 1).ended().status == "processed"
