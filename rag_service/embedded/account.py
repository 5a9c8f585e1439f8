"""The account that the embedded PostgreSQL runs as if this process is root, and its folders."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

from rag_service.errors import ConfigurationError

ACCOUNTS = ("postgres", "nobody")
# For files that the account cannot reach in their own folder.
SYSTEM_FOLDER = Path("/var/lib/rag_service")


def account_for(data: Path) -> int | None:
    """Return the uid that PostgreSQL runs as, or None for this process's own.

    PostgreSQL refuses to run as root. For root it is the owner of existing data, else the first
    of ACCOUNTS that exists. Raises ConfigurationError if there is none.
    """
    if os.geteuid() != 0:
        return None
    for account in _candidates(data):
        return account.pw_uid
    raise ConfigurationError(
        f"PostgreSQL does not run as root and there is no account {' or '.join(ACCOUNTS)}. "
        "Create one, start as another user, or set DATABASE_URL."
    )


def _candidates(data: Path) -> Iterator[pwd.struct_passwd]:
    with contextlib.suppress(KeyError, FileNotFoundError):
        owner = pwd.getpwuid(data.stat().st_uid)
        if owner.pw_uid != 0:
            yield owner
    for name in ACCOUNTS:
        with contextlib.suppress(KeyError):
            yield pwd.getpwnam(name)


def can_enter(folder: Path, user: int | None) -> bool:
    """Return whether this uid (None: this process) may enter the folder and all above it."""
    return blocking_folder(folder, user) is None


def blocking_folder(folder: Path, user: int | None) -> Path | None:
    """Return the first folder on the path that this uid may not enter, by its mode bits."""
    if user is None:
        return None
    path = folder.resolve()
    for step in (*reversed(path.parents), path):
        status = step.stat()
        if not status.st_mode & (0o100 if status.st_uid == user else 0o001):
            return step
    return None


def change_owner(folder: Path, user: int | None) -> None:
    """Make the account the owner of the folder and everything in it."""
    if user is None or folder.stat().st_uid == user:
        return
    group = pwd.getpwuid(user).pw_gid
    try:
        for path in (*folder.rglob("*"), folder):
            os.chown(path, user, group, follow_symlinks=False)
    except OSError as error:
        raise ConfigurationError(
            f"Cannot make {account_name(user)}, the account of PostgreSQL, the owner of {folder} "
            f"({error.strerror}). Set data_dir to a local folder, or set DATABASE_URL."
        ) from error


def account_name(user: int | None) -> str:
    return pwd.getpwuid(os.geteuid() if user is None else user).pw_name


def system_folder() -> Path:
    """Return the folder that root shares with the account; create it if it does not exist."""
    try:
        if not SYSTEM_FOLDER.exists():
            SYSTEM_FOLDER.mkdir(parents=True)
            SYSTEM_FOLDER.chmod(0o755)
    except OSError as error:
        raise ConfigurationError(
            f"Cannot create {SYSTEM_FOLDER} ({error.strerror}). Set data_dir to a folder that "
            "every user may enter, start as another user, or set DATABASE_URL."
        ) from error
    return SYSTEM_FOLDER
