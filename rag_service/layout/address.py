"""Where the layout server of a node is: its socket, or its URL elsewhere. Used by both ends."""

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
# httpx wants a host in its URLs, a socket has none.
_SOCKET_URL = "http://layout"


# A temporary folder may itself be too deep.
_SHORT_PARENTS = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108
_SOCKET_NAME_LENGTH = 22


@dataclass(frozen=True, slots=True)
class Address:
    """`socket` is None for a server that is reached by its URL alone."""

    url: str
    socket: Path | None = None

    def __str__(self) -> str:
        return str(self.socket or self.url)


def layout_address(settings: Settings) -> Address:
    """Where clients find the server, and where it listens unless layout.host is set.

    A data_dir too deep for a socket has it in the temporary folder. Raises ConfigurationError
    where somebody else holds that place.
    """
    if settings.layout.url is not None:
        return Address(settings.layout.url)
    socket = settings.layout.socket or settings.data_dir / _NAME
    if len(os.fsencode(socket)) > LONGEST_SOCKET_PATH:
        socket = _short_folder() / f"{_digest(socket)}.sock"
    return Address(_SOCKET_URL, socket)


def is_known(settings: Settings) -> bool:
    """Whether this process can tell how the server is: it has a URL, or ran on this node."""
    socket = layout_address(settings).socket
    return socket is None or socket.exists()


def _digest(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]


def _fits(folder: Path) -> bool:
    return len(os.fsencode(folder)) + _SOCKET_NAME_LENGTH <= LONGEST_SOCKET_PATH


def _short_folder() -> Path:
    """A folder of ours for sockets; nobody else may stand in for the server in it."""
    name = f"rag-service-layout-{os.geteuid()}"
    parents = (Path(tempfile.gettempdir()), *_SHORT_PARENTS)
    fitting = [parent / name for parent in parents if _fits(parent / name)]
    folder = fitting[0]
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat(follow_symlinks=False)
    if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
        raise ConfigurationError(f"layout.socket: {folder} is not ours; name another socket.")
    return folder
