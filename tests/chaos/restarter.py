"""Restarts programs that end, as an init system does, and kills what they left running."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tests.processes import Program, Programs

_CHECK_EVERY = 0.1


@dataclass
class _Kept:
    start: Callable[[], Program]
    program: Program


class Restarter:
    """Keeps one program per name running."""

    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self._programs: dict[str, _Kept] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._restart_ended, name="restarter")

    def __enter__(self) -> Restarter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, start: Callable[[], Program]) -> Program:
        """Start a program and keep it running."""
        program = start()
        self._programs[name] = _Kept(start, program)
        return program

    def program(self, name: str) -> Program:
        """Return the program that runs under this name now."""
        return self._programs[name].program

    def all(self) -> list[Program]:
        """Return every program that is kept running."""
        return [kept.program for kept in self._programs.values()]

    def stop(self) -> None:
        """Restart no program from now on."""
        self._stopped.set()
        self._thread.join()

    def _restart_ended(self) -> None:
        while not self._stopped.wait(_CHECK_EVERY):
            for kept in list(self._programs.values()):
                if kept.program.exit_code is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(kept.program.pid, signal.SIGKILL)
                    kept.program = kept.start()
