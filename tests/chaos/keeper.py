"""Keeps programs running as an init system does: what dies is started again, its leftovers ended.

Used by the chaos tests.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tests.processes import Program, Programs

_LOOK_EVERY = 0.1


@dataclass
class _Place:
    start: Callable[[], Program]
    program: Program


class Keeper:
    """One place a name; the program in it changes with every restart."""

    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self._places: dict[str, _Place] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look_after, name="keeper")

    def __enter__(self) -> Keeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()

    def keep(self, name: str, start: Callable[[], Program]) -> Program:
        """Start a program and keep it running."""
        program = start()
        self._places[name] = _Place(start, program)
        return program

    def at(self, name: str) -> Program:
        """The program that runs in this place now."""
        return self._places[name].program

    def all(self) -> list[Program]:
        """Every program that is kept."""
        return [place.program for place in self._places.values()]

    def let_go(self) -> None:
        """Restart nothing any more."""
        self._stopped.set()
        self._thread.join()

    def _look_after(self) -> None:
        while not self._stopped.wait(_LOOK_EVERY):
            for place in list(self._places.values()):
                if place.program.exit_code is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(place.program.pid, signal.SIGKILL)
                    place.program = place.start()
