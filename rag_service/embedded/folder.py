"""Folders of the embedded servers: locks, socket folders, leftovers of a crash, free ports."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import signal
import socket
import tempfile
from pathlib import Path

import psutil

from rag_service.embedded.account import can_enter
from rag_service.errors import ConfigurationError, ServiceUnreachable
from rag_service.runtime.clocks import file_system_clock
from rag_service.runtime.lock_file import LockFile, owner_of

log = logging.getLogger(__name__)

LOCK_NAME = "embedded.lock"
RUNTIME_PREFIX = "rag-service-"
LEFTOVER_SECONDS = 30.0
KILL_SECONDS = 5.0
ABANDONED_AFTER_SECONDS = 60.0
# sun_path holds 104 bytes on macOS and 108 on Linux, the final NUL included.
LONGEST_SOCKET_PATH = 103


class FolderLock:
    """Allows one owner per data folder. The kernel releases the lock when the owner ends."""

    def __init__(self, folder: Path) -> None:
        """Take the lock. Raises ConfigurationError, which names the process that holds it."""
        path = folder / LOCK_NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = LockFile(path)
        except OSError as error:
            raise ConfigurationError(_refusal(folder, owner_of(path), error)) from error

    def release(self) -> None:
        """Remove the file and release the lock. A second call does nothing."""
        self._file.release()


def require_unlocked(folder: Path) -> None:
    """Raise ConfigurationError, which names the process, if another one uses the folder."""
    if folder.exists():
        FolderLock(folder).release()


def _refusal(folder: Path, owner: str, error: OSError) -> str:
    if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP):
        return f"data_dir: {folder} is on a file system without locks ({error.strerror})."
    if not isinstance(error, BlockingIOError):
        return f"data_dir: {folder} cannot be used: {error.strerror}."
    return (
        f"{folder} is in use by another rag-service (process {owner or 'unknown'}). "
        "Stop that one first, or set data_dir to another folder."
    )


class RuntimeFolder:
    """A folder with a short name for sockets and files that must not outlive this process.

    It is locked while its owner lives. The next start removes unlocked ones, which a killed owner
    left. The lock also keeps systemd-tmpfiles from removing it.
    """

    def __init__(self, parent: Path) -> None:
        _remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=RUNTIME_PREFIX, dir=parent))
        self._file = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove the folder and everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._file)


def _remove_abandoned(parent: Path) -> None:
    now = file_system_clock(parent)
    for path in parent.glob(RUNTIME_PREFIX + "*"):
        with contextlib.suppress(OSError):
            status = path.stat(follow_symlinks=False)
            # For a moment a new folder is not locked yet.
            if status.st_uid != os.geteuid() or now - status.st_mtime < ABANDONED_AFTER_SECONDS:
                continue
            file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(file)


def short_parent(socket_name: str, user: int | None) -> Path:
    """Return the temporary folder, or /tmp if a socket does not fit or the user cannot enter."""
    for parent in (Path(tempfile.gettempdir()), Path("/tmp")):  # noqa: S108
        sample = parent / (RUNTIME_PREFIX + "x" * 8) / socket_name
        plain = not set(str(parent)) & set(" ,%'\"")
        if plain and len(os.fsencode(sample)) <= LONGEST_SOCKET_PATH and can_enter(parent, user):
            return parent
    raise ConfigurationError(
        "No temporary folder has a path short enough for sockets; set TMPDIR to one."
    )


def end_leftovers(folder: Path, program: str) -> None:
    """End a server that a killed owner left running in its data folder.

    The caller must hold the folder's lock: then no such process has an owner. Waits until it has
    ended, because a server writes its data as it shuts down. Raises ServiceUnreachable if it
    cannot be ended.
    """
    left = [p for p in psutil.process_iter() if _uses_folder(p, folder, program)]
    for process in left:
        log.warning("Ending %s of an earlier run (process %d).", program, process.pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGINT)
    _, left = psutil.wait_procs(left, LEFTOVER_SECONDS)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, left = psutil.wait_procs(left, KILL_SECONDS)
    if left:
        raise ServiceUnreachable(
            f"{program} of an earlier run (process {left[0].pid}) uses {folder} "
            "and cannot be ended."
        )


def _uses_folder(process: psutil.Process, folder: Path, program: str) -> bool:
    path = str(folder.resolve())
    try:
        name: str = process.name()
        return name == program and path in _paths_of(process)
    except psutil.NoSuchProcess:
        return False


def _paths_of(process: psutil.Process) -> list[str]:
    """Return its working directory; in a container root may only read others' arguments."""
    try:
        return [process.cwd()]
    except psutil.AccessDenied:
        return list(process.cmdline())


def require_free_port(host: str, port: int, setting_key: str) -> None:
    """Raise ConfigurationError, which names the setting, if the address cannot be listened on."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigurationError(
            f"{setting_key}: cannot listen on {host}:{port}: {error.strerror}. "
            f"Stop the program that uses this port, or set {setting_key} to another one."
        ) from error


def free_port() -> int:
    """Return a loopback TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
