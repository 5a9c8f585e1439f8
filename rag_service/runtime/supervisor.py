"""Starts child processes, restarts them when they end, and stops them in order.

One thread, which lives as long as the process, starts every child: the kernel sends a child its
death signal when the *thread* that started it ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from rag_service.errors import ServiceUnreachable
from rag_service.runtime.bounded_child import die_with

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
READY_POLL_SECONDS = 0.02
FIRST_RESTART_WAIT = 0.5
LONGEST_RESTART_WAIT = 30.0
STEADY_SECONDS = 60.0
KILL_SECONDS = 10.0
TAIL_BYTES = 4000
LARGEST_LOG = 20 * 1024 * 1024
_PRIVATE = 0o600


@dataclass(frozen=True)
class Program:
    """A command and how to start and stop it.

    `env` is the child's whole environment. start() polls `ready` until it returns True.
    `stop_signal` goes to the child alone; what is left of its process group when it has ended,
    or after `stop_seconds`, is killed. The kernel sends the child `death_signal` when this process
    ends (Linux). `log` receives stdout and stderr; if it is None, they are inherited. `user` is
    the uid to run as, if this process is root.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    stop_signal: signal.Signals = signal.SIGTERM
    stop_seconds: float = 10.0
    restart: bool = True
    ready: Callable[[], bool] | None = None
    ready_seconds: float = 30.0
    cwd: Path | None = None
    log: Path | None = None
    user: int | None = None
    death_signal: signal.Signals = signal.SIGKILL


@dataclass(frozen=True)
class ProgramStatus:
    """The state of a child. `restarts` counts since its start; `last_exit` is a text."""

    name: str
    pid: int | None
    restarts: int
    up: bool
    last_exit: str | None


@dataclass
class _Child:
    program: Program
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    log_offset: int = 0
    watched: bool = False
    restarts: int = 0
    quick_exits: int = 0
    due: float | None = None
    last_exit: str | None = None


class _Stopped(ServiceUnreachable):
    """The supervisor was stopped."""


class Supervisor:
    """Keeps programs running until stop(). Any thread may call its methods."""

    def __init__(self) -> None:
        self._children: list[_Child] = []
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="supervisor", daemon=True)
        self._thread.start()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, program: Program) -> None:
        """Start a program and wait until it is ready.

        Raises ServiceUnreachable, with the last log lines, if it cannot be started, ends, or is
        not ready in time. The program is not running then.
        """
        child = _Child(program)
        try:
            self._run_in_thread(lambda: self._launch(child))
            self._wait_until_ready(child)
        except BaseException:
            with contextlib.suppress(_Stopped):
                self._run_in_thread(lambda: self._remove(child))
            raise
        child.watched = True

    def stop(self) -> None:
        """Stop every program, the last started first. A second call does nothing.

        Afterwards no program can be started. May take the sum of all stop_seconds.
        """
        with contextlib.suppress(_Stopped):
            self._run_in_thread(self._stop_all)
        self._thread.join()

    def status(self) -> list[ProgramStatus]:
        """Return the state of every program, in the order in which they were started."""
        return [_status(child) for child in list(self._children)]

    def _run_in_thread(self, job: Callable[[], Any]) -> None:
        done: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise _Stopped("The supervisor was stopped; no program can be started.")
            self._jobs.put((job, done))
        done.result()

    def _loop(self) -> None:
        while not self._stopping:
            with contextlib.suppress(queue.Empty):
                self._execute(*self._jobs.get(timeout=POLL_SECONDS))
            for child in () if self._stopping else tuple(self._children):
                self._watch(child)
        with self._lock:
            self._closed = True
        while not self._jobs.empty():
            self._execute(*self._jobs.get())

    def _execute(self, job: Callable[[], Any], done: Future[Any]) -> None:
        try:
            done.set_result(job())
        except BaseException as error:
            done.set_exception(error)

    def _launch(self, child: _Child) -> None:
        if self._stopping:
            raise _Stopped(f"{child.program.name} is not started: the supervisor is stopping.")
        self._children.append(child)
        try:
            _spawn(child)
        except (OSError, subprocess.SubprocessError) as error:
            raise ServiceUnreachable(f"Cannot start {child.program.name}: {error}") from error

    def _wait_until_ready(self, child: _Child) -> None:
        program, process = child.program, child.process
        deadline = time.monotonic() + program.ready_seconds
        while program.ready is not None:
            if process is None or process.poll() is not None:
                raise ServiceUnreachable(f"{program.name} ended at its start.{_last_lines(child)}")
            if program.ready():
                return
            if time.monotonic() > deadline:
                raise ServiceUnreachable(
                    f"{program.name} is not ready after {program.ready_seconds:g} s."
                    f"{_last_lines(child)}"
                )
            time.sleep(READY_POLL_SECONDS)

    def _remove(self, child: _Child) -> None:
        if child in self._children:
            self._children.remove(child)
            _end(child)

    def _watch(self, child: _Child) -> None:
        if not child.watched:
            return
        if child.process is not None and child.process.poll() is not None:
            _kill_group(child.process.pid)
            self._handle_exit(child, _exit_text(child.process.returncode))
        elif child.due is not None and time.monotonic() >= child.due:
            self._restart(child)

    def _handle_exit(self, child: _Child, exit_text: str) -> None:
        """Log the exit and schedule the restart: each quick exit doubles the wait."""
        lived = time.monotonic() - child.started
        child.process, child.due, child.last_exit = None, None, exit_text
        child.quick_exits = child.quick_exits + 1 if lived < STEADY_SECONDS else 1
        name, tail = child.program.name, _last_lines(child)
        if not child.program.restart:
            log.error("%s %s after %.1f s and is not restarted.%s", name, exit_text, lived, tail)
            return
        wait = wait_before_restart(child.quick_exits)
        child.due = time.monotonic() + wait
        log.error(
            "%s %s after %.1f s (%d in a row); restarting it in %.1f s.%s",
            name, exit_text, lived, child.quick_exits, wait, tail,
        )  # fmt: skip

    def _restart(self, child: _Child) -> None:
        child.restarts += 1
        child.due = None
        try:
            _spawn(child)
        except (OSError, subprocess.SubprocessError) as error:
            self._handle_exit(child, f"could not be started ({error})")
        else:
            log.warning("%s was restarted (restart %d).", child.program.name, child.restarts)

    def _stop_all(self) -> None:
        self._stopping = True
        while self._children:
            _end(self._children[-1])
            self._children.pop()


def wait_before_restart(quick_exits: int) -> float:
    """Return the seconds from the nth quick exit in a row (n >= 1) to the restart."""
    return min(FIRST_RESTART_WAIT * 2.0 ** min(quick_exits - 1, 16), LONGEST_RESTART_WAIT)


def dies_with_this_process(death_signal: signal.Signals) -> Callable[[], None]:
    """Return a preexec_fn: the child gets this signal when the thread that starts it ends.

    Popen calls it after the change of user, which would clear the signal.
    """
    return partial(die_with, os.getpid(), death_signal)


def bare_environment() -> dict[str, str]:
    """Return the variables that any program needs to run; no secrets are among them."""
    names = ("PATH", "LD_LIBRARY_PATH", "TMPDIR")
    return {name: os.environ[name] for name in names if name in os.environ}


def identity(user: int | None) -> dict[str, Any]:
    """Return Popen's arguments for running as this uid with its own group and no others."""
    if user is None:
        return {}
    return {"user": user, "group": pwd.getpwuid(user).pw_gid, "extra_groups": []}


def _spawn(child: _Child) -> None:
    program = child.program
    with _output(program.log) as output:
        child.log_offset = output.tell() if output else 0
        child.process = subprocess.Popen(
            program.argv,
            env=dict(program.env),
            cwd=program.cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            # Ctrl-C in a terminal must reach only this process, which stops children in order.
            start_new_session=True,
            preexec_fn=dies_with_this_process(program.death_signal),
            **identity(program.user),
        )
    child.started = time.monotonic()


@contextlib.contextmanager
def _output(path: Path | None) -> Iterator[IO[bytes] | None]:
    if path is None:
        yield None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > LARGEST_LOG:
        path.chmod(_PRIVATE)
        path.replace(path.with_name(path.name + ".1"))
    # Logs name documents: other users of the machine may not read them, old ones included.
    with open(path, "ab", opener=_open_private) as output:
        os.fchmod(output.fileno(), _PRIVATE)
        yield output


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, _PRIVATE)


def _end(child: _Child) -> None:
    process, program = child.process, child.program
    child.due = None
    if process is None:
        return
    process.send_signal(program.stop_signal)
    try:
        process.wait(program.stop_seconds)
    except subprocess.TimeoutExpired:
        log.warning("%s did not stop in %g s; killing it.", program.name, program.stop_seconds)
    _kill_group(process.pid)
    try:
        process.wait(KILL_SECONDS)
    except subprocess.TimeoutExpired:
        log.error("%s (process %d) cannot be killed.", program.name, process.pid)


def _kill_group(group: int) -> None:
    # macOS returns EPERM for a group in which only zombies are left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _exit_text(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with status {returncode}"
    try:
        return f"was ended by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was ended by signal {-returncode}"


def _last_lines(child: _Child) -> str:
    """Return the last lines that the child logged since its start, to append to a sentence."""
    if child.program.log is None:
        return ""
    try:
        with child.program.log.open("rb") as written:
            end = written.seek(0, os.SEEK_END)
            written.seek(max(child.log_offset, end - TAIL_BYTES))
            text = written.read().decode(errors="replace").strip()
    except OSError as error:
        return f" (its log {child.program.log} cannot be read: {error.strerror})"
    return f" Its last lines ({child.program.log}):\n{text}" if text else ""


def _status(child: _Child) -> ProgramStatus:
    process = child.process
    up = process is not None and process.returncode is None
    pid = process.pid if process is not None and up else None
    return ProgramStatus(child.program.name, pid, child.restarts, up, child.last_exit)
