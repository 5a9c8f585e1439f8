"""The parent's side of a render child: start, send, receive, kill."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, cast

from rag_service.errors import ProcessInTrouble
from rag_service.pdf import pipe_frames
from rag_service.pdf.child_limits import ChildLimits
from rag_service.pdf.pipe_frames import Frame

START_LIMIT = 60.0
# Seconds for a frame that has arrived but was not yet read because the event loop is busy.
GRACE = 1.0
# Nearly every answer comes within this time; only a later one needs the child's processor time.
PROMPT = 0.1
# A child that used this share of its limit on a processor is slow, not starved of CPU.
BUSY_SHARE, STARVED_FACTOR = 0.8, 4
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
# The child reads hostile files: its environment must not contain the service's secrets.
PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR", "TZ")
PACKAGE_ROOT = str(Path(__file__).parents[2])


class ChildDied(Exception):
    """The render child ended before it answered."""


class ChildTimeout(Exception):
    """The render child did not answer in time and was killed."""


class RenderChild:
    """One child process. It dies with the thread that started it, at the latest."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._requests = cast(BinaryIO, process.stdin)
        self._reader = asyncio.StreamReader()
        self._transport: asyncio.BaseTransport | None = None
        self._pending: asyncio.Task[Frame] | None = None
        self.documents = 0
        # Resident memory after the last answer, and after the file was opened.
        self.mib = self.opened_mib = 0.0

    @classmethod
    async def start(cls, limits: ChildLimits) -> RenderChild:
        """Start a child and wait until it has loaded its modules.

        Raises ProcessInTrouble if it does not start: the cause is no document, but this process,
        the machine or the installation.
        """
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "rag_service.pdf.child", str(os.getpid()),
                 json.dumps(asdict(limits))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env=_environment(), start_new_session=True,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            raise ProcessInTrouble(f"The render process does not start: {error}.") from error
        child = cls(process)
        try:
            await child._connect()
            await child.receive(START_LIMIT)
        except (ChildDied, ChildTimeout) as error:
            child.kill()
            raise ProcessInTrouble(
                "The render process does not start; the log has the details."
            ) from error
        except BaseException:
            child.kill()
            raise
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def reap(self) -> None:
        """Reap the process if it has ended; otherwise do nothing."""
        self._process.poll()

    def send(self, frame: Frame) -> None:
        """Send a request. Never blocks: requests are small, and the child reads each at once."""
        try:
            self._requests.write(pipe_frames.encode(frame))
            self._requests.flush()
        except OSError as error:
            raise ChildDied from error

    async def receive(self, limit: float) -> Frame:
        """Return the next frame. Raises ChildDied, or ChildTimeout after `limit` seconds.

        A child that gets no processor time has up to STARVED_FACTOR times as long, so that a busy
        machine is not mistaken for a bad page.
        """
        task = self._pending or asyncio.create_task(pipe_frames.receive(self._reader))
        self._pending = task
        if not await self._ends_in_time(task, limit):
            raise ChildTimeout
        self._pending = None
        try:
            frame = task.result()
        except asyncio.IncompleteReadError as error:
            raise ChildDied from error
        self.mib = frame.head.get("mib", self.mib)
        return frame

    async def _ends_in_time(self, task: asyncio.Task[Frame], limit: float) -> bool:
        prompt, _ = await asyncio.wait({task}, timeout=min(PROMPT, limit))
        if prompt:
            return True
        used = self.processor_seconds()
        for _ in range(STARVED_FACTOR):
            done, _ = await asyncio.wait({task}, timeout=limit)
            if done:
                return True
            if self.processor_seconds() - used >= BUSY_SHARE * limit:
                break
        done, _ = await asyncio.wait({task}, timeout=GRACE)
        return bool(done)

    def processor_seconds(self) -> float:
        """Return the processor time of the child so far, 0 if it has ended."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return 0.0
        # Fields 14 and 15 of proc(5); field 2 may contain spaces and ends with a parenthesis.
        user, system = stat.rsplit(")", 1)[1].split()[11:13]
        return (int(user) + int(system)) / CLOCK_TICKS

    def kill(self) -> None:
        """Kill the child and everything it started; safe to call twice."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        # A process that hangs in a dead file system ends much later; subprocess reaps it then,
        # when this process starts its next child.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        if self._transport is not None:
            self._transport.close()
        with contextlib.suppress(OSError):
            self._requests.close()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._reader), self._process.stdout
        )


def _environment() -> dict[str, str]:
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    paths = [PACKAGE_ROOT, environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment
