"""The supervisor with real child processes: small Python programs."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_service.errors import ServiceUnreachable
from rag_service.runtime import supervisor
from rag_service.runtime.supervisor import Program, Supervisor
from tests.waiting import eventually

SLEEP = "import time; time.sleep(600)"


def program(name: str, code: str, **options: object) -> Program:
    return Program(name=name, argv=(sys.executable, "-c", code), env=dict(os.environ), **options)  # type: ignore[arg-type]


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def sup(monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_RESTART_WAIT", 0.05)
    with Supervisor() as one:
        yield one


def only(sup):
    (status,) = sup.status()
    return status


def test_start_waits_until_the_program_is_ready(sup, tmp_path):
    mark = tmp_path / "mark"
    code = f"import time; time.sleep(0.2); open({str(mark)!r}, 'w'); time.sleep(600)"
    sup.start(program("slow", code, ready=mark.exists))
    assert mark.exists()
    assert only(sup).up


def test_a_program_that_ends_at_its_start_is_reported_with_its_last_lines(sup, tmp_path):
    log = tmp_path / "logs" / "p.log"
    code = "import sys; print('to stdout'); sys.exit('the disk is full')"
    with pytest.raises(ServiceUnreachable, match="the disk is full") as caught:
        sup.start(program("broken", code, ready=lambda: False, log=log))
    assert "to stdout" in caught.value.message
    assert sup.status() == []


def test_only_the_lines_of_this_start_are_reported(sup, tmp_path):
    log = tmp_path / "p.log"
    log.write_text("an old failure\n")
    with pytest.raises(ServiceUnreachable) as caught:
        sup.start(program("p", "print('a new failure')", ready=lambda: False, log=log))
    assert "a new failure" in caught.value.message
    assert "an old failure" not in caught.value.message
    assert log.read_text().startswith("an old failure")


def test_a_program_that_is_not_ready_in_time_is_ended(sup):
    pids = []

    def never_ready():
        pids.append(only(sup).pid)
        return False

    with pytest.raises(ServiceUnreachable, match="never is not ready after 1 s"):
        sup.start(program("never", SLEEP, ready=never_ready, ready_seconds=1))
    assert has_ended(pids[0])
    assert sup.status() == []


def test_a_program_that_does_not_exist_is_named(sup):
    with pytest.raises(ServiceUnreachable, match="Cannot start absent"):
        sup.start(Program("absent", ("/nowhere/absent",), {}))
    assert sup.status() == []


def test_the_child_has_exactly_the_environment_it_is_given(sup, tmp_path):
    out = tmp_path / "out"
    code = f"import os; open({str(out)!r},'w').write(repr('HOME' in os.environ)+os.environ['A'])"
    argv = (sys.executable, "-c", code)
    sup.start(Program("p", argv, {"A": "1"}, restart=False))
    eventually(lambda: only(sup).last_exit is not None)
    assert out.read_text() == "False1"


def test_a_child_that_dies_is_restarted(sup):
    sup.start(program("p", SLEEP))
    first = only(sup).pid
    os.kill(first, signal.SIGKILL)
    eventually(lambda: only(sup).up and only(sup).restarts == 1)
    assert only(sup).pid != first
    assert only(sup).last_exit == "was ended by SIGKILL"


def test_a_clean_exit_is_restarted_too(sup):
    sup.start(program("p", "pass"))
    eventually(lambda: only(sup).restarts >= 1)
    assert only(sup).last_exit == "ended with status 0"


def test_a_child_that_keeps_dying_waits_longer_each_time_and_is_logged(sup, tmp_path, caplog):
    log = tmp_path / "p.log"
    with caplog.at_level(logging.WARNING):
        sup.start(program("p", "print('no port'); raise SystemExit(7)", log=log))
        eventually(lambda: only(sup).restarts >= 3)
    assert only(sup).last_exit == "ended with status 7"
    exits = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert [f"({n} in a row)" in text for n, text in enumerate(exits, 1)] == [True] * len(exits)
    assert all("no port" in text and "status 7" in text for text in exits)
    waits = [float(text.split("restarting it in ")[1].split(" s")[0]) for text in exits]
    assert waits[:3] == sorted(waits[:3])
    assert waits[2] > waits[0]


def test_a_child_that_ran_long_is_restarted_after_the_first_wait(sup, monkeypatch, caplog):
    monkeypatch.setattr(supervisor, "STEADY_SECONDS", 0)
    sup.start(program("p", "pass"))
    eventually(lambda: only(sup).restarts >= 2)
    exits = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert all("(1 in a row)" in text for text in exits)


@given(st.integers(min_value=1, max_value=10_000))
def test_waits_grow_and_are_capped(deaths):
    wait = supervisor.wait_before_restart(deaths)
    after = supervisor.wait_before_restart(deaths + 1)
    assert 0 < wait <= after <= supervisor.LONGEST_RESTART_WAIT
    assert after > wait or wait == supervisor.LONGEST_RESTART_WAIT


def test_a_program_not_to_be_restarted_stays_down(sup, caplog):
    sup.start(program("once", "pass", restart=False))
    eventually(lambda: only(sup).last_exit is not None)
    assert not only(sup).up
    assert only(sup).pid is None
    assert "is not restarted" in caplog.text


def test_programs_stop_in_reverse_order_each_by_its_signal(sup, tmp_path):
    out = tmp_path / "order"
    for name, stop in (("a", signal.SIGTERM), ("b", signal.SIGINT), ("c", signal.SIGUSR1)):
        mark = tmp_path / name
        code = (
            "import signal,time\n"
            "def end(number, frame):\n"
            "    time.sleep(0.1)\n"
            f"    open({str(out)!r}, 'a').write({name!r} + signal.Signals(number).name + ' ')\n"
            "    raise SystemExit\n"
            "for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1): signal.signal(s, end)\n"
            f"open({str(mark)!r}, 'w')\n"
            "while True: time.sleep(1)\n"
        )
        sup.start(program(name, code, stop_signal=stop, stop_seconds=60, ready=mark.exists))
    sup.stop()
    assert out.read_text() == "cSIGUSR1 bSIGINT aSIGTERM "
    assert sup.status() == []


FAMILY = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if {ignores_term}: signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open({path!r} + ".part", "w") as f: f.write(str(child.pid))
os.rename({path!r} + ".part", {path!r})
time.sleep(600)
"""


@pytest.mark.parametrize("ignores_term", [True, False])
def test_stop_ends_a_program_and_its_children(sup, tmp_path, ignores_term):
    mark = tmp_path / "grandchild"
    code = FAMILY.format(ignores_term=ignores_term, path=str(mark))
    stop_seconds = 0.5 if ignores_term else 60
    sup.start(program("family", code, ready=mark.exists, stop_seconds=stop_seconds))
    child, grandchild = only(sup).pid, int(mark.read_text())
    sup.stop()
    assert has_ended(child)
    eventually(lambda: has_ended(grandchild))


def test_children_of_a_dead_child_are_ended_before_its_restart(sup, tmp_path):
    mark = tmp_path / "grandchild"
    sup.start(
        program("family", FAMILY.format(ignores_term=False, path=str(mark)), ready=mark.exists)
    )
    grandchild = int(mark.read_text())
    os.kill(only(sup).pid, signal.SIGKILL)
    eventually(lambda: only(sup).restarts == 1)
    eventually(lambda: has_ended(grandchild))


def test_stop_may_be_called_twice_and_then_no_program_can_be_started(sup):
    sup.start(program("p", SLEEP))
    sup.stop()
    sup.stop()
    with pytest.raises(ServiceUnreachable, match="stopped"):
        sup.start(program("late", SLEEP))


def test_stop_interrupts_a_start_that_waits(sup):
    failures = []

    def start() -> None:
        try:
            sup.start(program("never", SLEEP, ready=lambda: False))
        except ServiceUnreachable as error:
            failures.append(error)

    starter = threading.Thread(target=start)
    starter.start()
    eventually(lambda: bool(sup.status()) and only(sup).up)
    pid = only(sup).pid
    sup.stop()
    starter.join(120)
    assert len(failures) == 1
    assert has_ended(pid)


def test_children_have_a_session_of_their_own(sup):
    sup.start(program("p", SLEEP))
    assert os.getsid(only(sup).pid) != os.getsid(0)
    assert os.getpgid(only(sup).pid) != os.getpgid(0)


@pytest.mark.skipif(sys.platform != "linux", reason="death signals are Linux's")
def test_a_child_outlives_the_thread_that_called_start(sup):
    caller = threading.Thread(target=lambda: sup.start(program("p", SLEEP)))
    caller.start()
    caller.join()
    pid = only(sup).pid
    # A death signal would have come at the thread's end, before the next child has run.
    sup.start(program("later", "pass", restart=False))
    eventually(lambda: sup.status()[1].last_exit is not None)
    assert sup.status()[0].pid == pid
    assert sup.status()[0].restarts == 0


OWNER = """
import os, signal, sys, time
from rag_service.runtime import supervisor
from rag_service.runtime.supervisor import Program, Supervisor
supervisor.FIRST_RESTART_WAIT = 0.05
sup = Supervisor()
code = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
for name in ("steady", "restarted"):
    sup.start(Program(name, (sys.executable, "-c", code), dict(os.environ)))
os.kill(sup.status()[1].pid, signal.SIGKILL)
while not (sup.status()[1].up and sup.status()[1].restarts): time.sleep(0.02)
print(*(s.pid for s in sup.status()), flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="death signals are Linux's")
def test_no_child_outlives_a_killed_owner():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(word) for word in owner.stdout.readline().split()]
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    assert len(pids) == 2
    try:
        eventually(lambda: all(has_ended(pid) for pid in pids))
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_log_that_is_too_large_is_rotated(sup, tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "LARGEST_LOG", 10)
    log = tmp_path / "p.log"
    log.write_text("more than ten bytes\n")
    log.chmod(0o644)
    sup.start(program("p", "print('new')", restart=False, log=log))
    eventually(lambda: only(sup).last_exit is not None)
    assert log.read_text() == "new\n"
    assert Path(f"{log}.1").read_text() == "more than ten bytes\n"
    assert Path(f"{log}.1").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [None, 0o644])
def test_a_log_is_readable_by_its_owner_alone(sup, tmp_path, mode):
    log = tmp_path / "p.log"
    if mode is not None:
        log.write_text("old\n")
        log.chmod(mode)
    sup.start(program("p", "print('new')", restart=False, log=log))
    eventually(lambda: only(sup).last_exit is not None)
    assert log.stat().st_mode & 0o777 == 0o600
    assert log.read_text().endswith("new\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_program_can_run_as_another_user_without_the_groups_of_root(sup, tmp_path):
    import pwd

    account = pwd.getpwnam("nobody")
    log = tmp_path / "p.log"
    sup.start(
        Program("p", ("/bin/sh", "-c", "id -u; id -G"), supervisor.bare_environment(),
                restart=False, log=log, user=account.pw_uid)
    )  # fmt: skip
    eventually(lambda: only(sup).last_exit is not None)
    assert log.read_text().split() == [str(account.pw_uid), str(account.pw_gid)]
