"""A Valkey of a test's own, which can be put into the states in which it answers with errors."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from rag_service.embedded.valkey import _binary
from tests.net import free_port

_DEAD_PORT = 1
_LIMIT_SECONDS = 30.0


class OwnBroker:
    """One server; `admin` is a client that every state leaves usable."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self.url = f"redis://:first@127.0.0.1:{self._port}/0"
        self._password = "first"
        self._process = self._start()

    def __enter__(self) -> OwnBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [
                str(_binary()), "--bind", "127.0.0.1", "--port", str(self._port),
                "--requirepass", "first", "--save", "", "--enable-protected-configs", "yes",
                *options,
            ],
            cwd=self._folder, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + _LIMIT_SECONDS
        while time.monotonic() < deadline:
            try:
                self.call("INFO", "server")
            except redis.ConnectionError:
                time.sleep(0.05)
            else:
                return process
        raise AssertionError("The broker does not answer.")

    def call(self, *command: str | int) -> Any:
        """Send one command over a connection of its own."""
        with redis.Redis(port=self._port, password=self._password) as client:
            return client.execute_command(*command)

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """READONLY: it was made a replica, as in a failover."""
        self.call("REPLICAOF", "127.0.0.1", _DEAD_PORT)
        yield
        self.call("REPLICAOF", "NO", "ONE")

    @contextmanager
    def master_down(self) -> Iterator[None]:
        """MASTERDOWN: it is a replica without its master and answers no reads either."""
        self.call("CONFIG", "SET", "replica-serve-stale-data", "no")
        self.call("REPLICAOF", "127.0.0.1", _DEAD_PORT)
        yield
        self.call("REPLICAOF", "NO", "ONE")

    @contextmanager
    def out_of_memory(self) -> Iterator[None]:
        """OOM: its memory limit is reached."""
        self.call("CONFIG", "SET", "maxmemory", "1")
        yield
        self.call("CONFIG", "SET", "maxmemory", "0")

    @contextmanager
    def unable_to_save(self) -> Iterator[None]:
        """MISCONF: a snapshot failed."""
        self.call("CONFIG", "SET", "dir", "/proc")
        self.call("CONFIG", "SET", "save", "3600 1")
        self.call("BGSAVE")
        while b"rdb_last_bgsave_status:ok" in self.call_text("INFO", "persistence"):
            time.sleep(0.05)
        yield
        self.call("CONFIG", "SET", "save", "")
        self.call("CONFIG", "SET", "dir", str(self._folder))

    def call_text(self, *command: str) -> bytes:
        """Return an answer in bulk as bytes."""
        with redis.Redis(port=self._port, password=self._password) as client:
            client.response_callbacks.clear()
            return bytes(client.execute_command(*command))

    @contextmanager
    def without_replicas(self) -> Iterator[None]:
        """NOREPLICAS: it takes no writes without a replica."""
        self.call("CONFIG", "SET", "min-replicas-to-write", "1")
        yield
        self.call("CONFIG", "SET", "min-replicas-to-write", "0")

    @contextmanager
    def another_password(self) -> Iterator[None]:
        """WRONGPASS, after every connection was closed."""
        self.call("CONFIG", "SET", "requirepass", "second")
        self._password = "second"
        self.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        self.call("CLIENT", "KILL", "TYPE", "pubsub")
        yield
        self.call("CONFIG", "SET", "requirepass", "first")
        self._password = "first"

    @contextmanager
    def forbidden(self) -> Iterator[None]:
        """NOPERM: the commands of queues are not allowed."""
        self.call("ACL", "SETUSER", "default", "-@list", "-@pubsub")
        yield
        self.call("ACL", "SETUSER", "default", "+@all")

    @contextmanager
    def wrong_type(self) -> Iterator[None]:
        """WRONGTYPE: the queues' keys hold something else."""
        for key in ("prepare", "ocr"):
            self.call("SET", key, "not a list")
        yield
        self.call("DEL", "prepare", "ocr")

    @contextmanager
    def loading(self) -> Iterator[None]:
        """LOADING: it was restarted and reads its data."""
        for number in range(40):
            self.call("SET", f"key {number}", "x" * 4000)
        self.call("CONFIG", "SET", "rdbcompression", "no")
        self.call("SAVE")
        self._process.kill()
        self._process.wait()
        self._process = self._start(
            "--key-load-delay", "100000", "--loading-process-events-interval-bytes", "1024"
        )
        yield
        self.call("INFO", "server")
