"""Starts, watches and stops a whole service on this machine, for `run` and `up`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rag_service.errors import ServiceUnreachable
from rag_service.states import Stage

if TYPE_CHECKING:
    from rag_service.config.options import Settings
    from rag_service.embedded import Program

_LAUNCH_POLL = 0.01
# Restarts of one program after which it is not expected to recover.
_DEATH_LIMIT = 3
_SERVERS = frozenset({"postgres", "valkey"})
_SERVER_WAIT = 60.0


class LocalService:
    """Database, broker and programs over one folder; its exit stops everything it started."""

    def __init__(self, settings: Settings, folder: Path, *, durable: bool) -> None:
        from rag_service.embedded import EmbeddedStack

        self._stack = EmbeddedStack(settings, folder, durable=durable)
        self._starting: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix="start")
        self._cleanup = ExitStack()
        self._cleanup.callback(self._pool.shutdown)
        self._cleanup.callback(self._stack.stop)
        self._cleanup.callback(self._drain_workers)

    def __enter__(self) -> LocalService:
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def start_servers(self, environment: Mapping[str, str]) -> Settings:
        """Start the servers that are not configured, migrate, and set `environment` for all.

        Returns the settings that now apply to this process and its children.
        Raises ConfigurationError, ServiceUnreachable.
        """
        from rag_service.cli.process_commands import await_postgres
        from rag_service.config.loader import get_settings
        from rag_service.database import schema

        os.environ.update(environment)
        os.environ.update(self._stack.start_servers())
        get_settings.cache_clear()
        await_postgres(_SERVER_WAIT)
        schema.migrate()
        return get_settings()

    def start(self, programs: Sequence[Program]) -> None:
        """Launch the programs in order without waiting until they are ready; see check()."""
        for program in programs:
            started = self._pool.submit(self._stack.supervisor.start, program)
            self._starting.append(started)
            while not started.done() and program.name not in self._names():
                time.sleep(_LAUNCH_POLL)

    def wait_until_ready(self) -> None:
        """Return when every launched program is ready. Raises ServiceUnreachable."""
        for started in self._starting:
            started.result()

    def check(self) -> None:
        """Raise ServiceUnreachable if a program did not start or keeps ending."""
        for started in self._starting:
            if started.done():
                started.result()
        for program in self._stack.supervisor.status():
            if program.restarts >= _DEATH_LIMIT:
                raise ServiceUnreachable(
                    f"{program.name} keeps ending ({program.last_exit}); its last log lines "
                    "are above."
                )

    def kill(self) -> None:
        """Kill every program at once; the servers end when this process ends."""
        for program in self._stack.supervisor.status():
            if program.pid is not None and program.name not in _SERVERS:
                with suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)

    def _drain_workers(self) -> None:
        """Signal both workers at once; the stop that follows waits for one after the other."""
        for program in self._stack.supervisor.status():
            if program.pid is not None and program.name in set(Stage):
                with suppress(ProcessLookupError):
                    os.kill(program.pid, signal.SIGTERM)

    def _names(self) -> set[str]:
        return {program.name for program in self._stack.supervisor.status()}
