"""The servers that `up` and `run` start, over one locked data folder."""

from __future__ import annotations

from pathlib import Path

from rag_service.config.options import Settings
from rag_service.embedded.account import account_for
from rag_service.embedded.folder import FolderLock, RuntimeFolder, short_parent
from rag_service.embedded.postgres import DATA_NAME, SOCKET_FOLDER, SOCKET_NAME, Postgres
from rag_service.embedded.valkey import Valkey
from rag_service.runtime.supervisor import Supervisor


class EmbeddedStack:
    """Runs PostgreSQL and Valkey if the settings name none, and supervises more programs.

    `folder` is locked while the stack lives. `durable`: data survives a power cut; without it
    writes are not synced to disk, which is faster and enough for temporary data.
    """

    def __init__(self, settings: Settings, folder: Path, *, durable: bool) -> None:
        self.supervisor = Supervisor()
        self._settings = settings
        self._folder = folder.absolute()
        self._durable = durable
        self._lock: FolderLock | None = None
        self._runtime: RuntimeFolder | None = None

    def __enter__(self) -> EmbeddedStack:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start_servers(self) -> dict[str, str]:
        """Start the servers that are not configured. Return their DATABASE_URL and REDIS_URL.

        Raises ConfigurationError if the folder is held by another process (named) or cannot be
        used, ServiceUnreachable if a server does not start. Nothing is left running then.
        """
        try:
            self._lock = FolderLock(self._folder)
            environment = {}
            if self._settings.database.url is None:
                environment["DATABASE_URL"] = self._start_postgres()
            if self._settings.redis.url is None:
                environment["REDIS_URL"] = self._start_valkey()
        except BaseException:
            self.stop()
            raise
        return environment

    def stop(self) -> None:
        """Stop all programs, the last started first, and unlock the folder. May be called twice."""
        self.supervisor.stop()
        if self._runtime is not None:
            self._runtime.remove()
            self._runtime = None
        if self._lock is not None:
            self._lock.release()

    def _start_postgres(self) -> str:
        user = account_for(self._folder / DATA_NAME)
        server = Postgres(self._folder, self._runtime_folder(user), self._durable, user)
        self.supervisor.start(server.prepare())
        return server.url

    def _start_valkey(self) -> str:
        server = Valkey(self._folder, self._runtime_folder(None), self._durable)
        self.supervisor.start(server.prepare())
        return server.url

    def _runtime_folder(self, user: int | None) -> Path:
        if self._runtime is None:
            self._runtime = RuntimeFolder(short_parent(f"{SOCKET_FOLDER}/{SOCKET_NAME}", user))
        return self._runtime.path
