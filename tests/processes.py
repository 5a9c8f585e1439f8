"""Real processes for tests: workers and maintenance, started as users start them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")
# The limit only ends a broken test: it leaves time for a machine that is busy with other work.
PATIENCE = 150.0
_POLL = 0.05
_TAIL = 6000


class Program:
    """One process with its log file. A worker's children are forks, theirs are render children."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._popen.poll()

    @property
    def text(self) -> str:
        """Everything that it and its forks have logged."""
        return self.log.read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the main process only."""
        self._popen.send_signal(number)

    def kill(self) -> None:
        """Kill it and every process under it."""
        family = self.family()
        for pid in (self.pid, *family):
            kill(pid)
        self._popen.wait(PATIENCE)

    def wait(self, seconds: float = PATIENCE) -> int:
        """Wait until it has ended and return its exit code."""
        try:
            return self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.name} did not end in {seconds:g} s.\n{self.tail()}"
            ) from None

    def forks(self) -> list[int]:
        """Return the pids of its direct children."""
        return [child.pid for child in _children(self.pid)]

    def family(self) -> list[int]:
        """Return the pids of all processes under it."""
        return [child.pid for child in _children(self.pid, recursive=True)]

    def tail(self) -> str:
        """Return its name, its exit code and the end of its log."""
        return f"--- {self.name} ({self.log}), exit code {self.exit_code}\n{self.text[-_TAIL:]}"


class Programs:
    """The processes of one service; the exit of the context kills those that still run."""

    def __init__(self, env: Mapping[str, str], folder: Path) -> None:
        self.env = dict(env)
        self._folder = folder
        self.all: list[Program] = []

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_: object) -> None:
        for program in self.all:
            if program.exit_code is None:
                program.kill()

    def start(self, name: str, argv: Sequence[str], **env: str) -> Program:
        """Start a program with the service's environment and these variables."""
        log = self._folder / f"{name}-{len(self.all)}.log"
        program = Program(name, argv, self.env | env, log)
        self.all.append(program)
        return program

    def start_worker(self, stage: str, forks: int, **env: str) -> Program:
        """Start a worker of the stage; wait_ready() waits until it consumes."""
        concurrency = {
            "prepare": "RAG_SERVICE_PREPARE_WORKER_CONCURRENCY", "ocr": "OCR_WORKER_CONCURRENCY",
        }[stage]  # fmt: skip
        return self.start(stage, command("worker", stage), **{concurrency: str(forks)}, **env)

    def start_celery(self, *arguments: str, **env: str) -> Program:
        """Start `celery -A workers.celery_app worker` with these arguments and no others."""
        argv = [sys.executable, "-m", "celery", "-A", "workers.celery_app", "worker", *arguments]
        return self.start("celery", argv, **env)

    def start_maintenance(self, **env: str) -> Program:
        """Start the maintenance loop."""
        return self.start("maintenance", command("worker", "maintenance"), **env)

    def wait_ready(self, *workers: Program) -> None:
        """Return when the workers consume their queues."""
        self.wait_until(
            lambda: all(" ready." in worker.text for worker in workers), "the workers are ready"
        )

    def fork_at(self, port: int) -> int:
        """Return the pid of the fork whose connection has this local port."""
        for pid in (pid for program in self.all for pid in program.forks()):
            with contextlib.suppress(psutil.Error):
                connections = psutil.Process(pid).net_connections("tcp")
                if any(connection.laddr.port == port for connection in connections):
                    return pid
        raise AssertionError(f"No fork has a connection from port {port}.\n{self.tails()}")

    def fork_to(self, port: int) -> int:
        """Return the pid of the one fork that has a connection to this port."""
        found = []
        for pid in (pid for program in self.all for pid in program.forks()):
            with contextlib.suppress(psutil.Error):
                connections = psutil.Process(pid).net_connections("tcp")
                found += [pid for one in connections if one.raddr and one.raddr.port == port]
        assert len(set(found)) == 1, f"Forks with a connection to port {port}: {found}"
        return found[0]

    def wait_until(self, condition: Callable[[], T], what: str, seconds: float = PATIENCE) -> T:
        """Return the first true value of the condition. Raises AssertionError with all logs."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise AssertionError(f"Not within {seconds:g} s: {what}\n{self.tails()}")
            time.sleep(_POLL)
        return value

    def tails(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(program.tail() for program in self.all)


def kill(pid: int) -> None:
    """Send SIGKILL; a process that has already ended is ignored."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def suspended(*pids: int) -> Iterator[None]:
    """Let the processes stand still during the block."""
    processes = [psutil.Process(pid) for pid in pids]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def is_alive(pid: int) -> bool:
    """Return whether a process with this pid runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rag_service.cli.main", *arguments]


def _children(pid: int, *, recursive: bool = False) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []
