"""The OCR server as a child process of the handler, which starts, watches and stops it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence

from workers.runpod_handler.faults import ServerUnhealthy

_TAIL_LINES = 20
_STOP_SECONDS = 10.0
_CHECK_SECONDS = 0.2


class ServerProcess:
    """One server process in its own process group; without a command it runs elsewhere."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._stopping = False
        # Called once, in a thread, when the server ends although stop() was not called.
        self.on_end: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Start the server. Raises ServerUnhealthy if the program cannot be started."""
        if not self._command:
            return
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ServerUnhealthy(f"The OCR server cannot be started: {error}") from error
        for work in (self._copy_output, self._await_end):
            threading.Thread(target=work, args=(self._process,), daemon=True).start()

    @property
    def ended(self) -> str | None:
        """How the server ended; None while it runs, or if it runs elsewhere."""
        if self._process is None or self._process.poll() is None:
            return None
        tail = " | ".join(self._tail) or "none"
        return (
            f"The OCR server ended with exit code {self._process.returncode}; last output: {tail}"
        )

    async def wait_ended(self) -> str:
        """Return `ended` when the server has ended; wait for ever if it runs elsewhere."""
        while (ended := self.ended) is None:
            await asyncio.sleep(_CHECK_SECONDS)
        return ended

    def stop(self) -> None:
        """Stop the server and every process that it started."""
        self._stopping = True
        if self._process is None:
            return
        self._signal_group(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _copy_output(self, process: subprocess.Popen[bytes]) -> None:
        for line in process.stdout or ():
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            self._tail.append(line.decode(errors="replace").rstrip()[:300])

    def _await_end(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        if not self._stopping:
            self.on_end()
