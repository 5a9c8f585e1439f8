"""The address of a node's layout server: its socket on the node, or the URL of another one."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rag_service.config.option_types import LONGEST_SOCKET_PATH
from rag_service.config.options import Settings
from rag_service.errors import ConfigurationError

_NAME = "layout.sock"
# httpx needs a host in its URLs, but a socket has none.
_SOCKET_URL = "http://layout"

# The path of the temporary folder may itself be too long.
_SHORT_PARENTS = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108
_SOCKET_NAME_LENGTH = 22


@dataclass(frozen=True, slots=True)
class Address:
    """`socket` is None for a server that is reached by its URL."""

    url: str
    socket: Path | None = None

    def __str__(self) -> str:
        return str(self.socket or self.url)


def layout_address(settings: Settings) -> Address:
    """Return the server's address for clients; it listens there unless layout.host is set.

    If the path in data_dir is too long for a socket, the socket is in the temporary folder. Raises
    ConfigurationError if that folder belongs to another user.
    """
    if settings.layout.url is not None:
        return Address(settings.layout.url)
    socket = settings.layout.socket or settings.data_dir / _NAME
    if len(os.fsencode(socket)) > LONGEST_SOCKET_PATH:
        socket = _short_folder() / f"{_digest(socket)}.sock"
    return Address(_SOCKET_URL, socket)


def is_known(settings: Settings) -> bool:
    """Return True if this process can ask the server: it has a URL, or it ran on this node."""
    socket = layout_address(settings).socket
    return socket is None or socket.exists()


def _digest(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]


def _fits(folder: Path) -> bool:
    return len(os.fsencode(folder)) + _SOCKET_NAME_LENGTH <= LONGEST_SOCKET_PATH


def _short_folder() -> Path:
    """Return this user's folder for sockets, so that no other user can replace the server."""
    name = f"rag-service-layout-{os.geteuid()}"
    parents = (Path(tempfile.gettempdir()), *_SHORT_PARENTS)
    fitting = [parent / name for parent in parents if _fits(parent / name)]
    folder = fitting[0]
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat(follow_symlinks=False)
    if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
        raise ConfigurationError(
            f"layout.socket: {folder} belongs to another user; set another socket path."
        )
    return folder
