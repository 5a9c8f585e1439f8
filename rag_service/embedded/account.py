"""The account that PostgreSQL runs as, which is not ours when we are root, and its folders.

Used by the embedded PostgreSQL.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

from rag_service.errors import ConfigurationError

ACCOUNTS = ("postgres", "nobody")
# For what the account may not reach where it stands.
SYSTEM_FOLDER = Path("/var/lib/rag_service")


def account_for(data: Path) -> int | None:
    """The uid that PostgreSQL runs as: None (our own) unless we are root, which it refuses.

    The owner of data that is there already, else the first of ACCOUNTS. Raises
    ConfigurationError where there is none.
    """
    if os.geteuid() != 0:
        return None
    for account in _candidates(data):
        return account.pw_uid
    raise ConfigurationError(
        f"PostgreSQL does not run as root and there is no account {' or '.join(ACCOUNTS)}. "
        "Make one, start as another user, or set DATABASE_URL."
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
    """Whether this uid (None: we ourselves) may pass through the folder and all above it."""
    return blocking_folder(folder, user) is None


def blocking_folder(folder: Path, user: int | None) -> Path | None:
    """The first folder on the way that this uid may not pass; judged by mode bits for others."""
    if user is None:
        return None
    path = folder.resolve()
    for step in (*reversed(path.parents), path):
        status = step.stat()
        if not status.st_mode & (0o100 if status.st_uid == user else 0o001):
            return step
    return None


def give(folder: Path, user: int | None) -> None:
    """Make the account the owner of the folder and all in it, if it is not yet."""
    if user is None or folder.stat().st_uid == user:
        return
    group = pwd.getpwuid(user).pw_gid
    try:
        for path in (*folder.rglob("*"), folder):
            os.chown(path, user, group, follow_symlinks=False)
    except OSError as error:
        raise ConfigurationError(
            f"{folder} cannot be given to {account_name(user)}, as whom PostgreSQL runs "
            f"({error.strerror}). Set data_dir to a local folder, or set DATABASE_URL."
        ) from error


def account_name(user: int | None) -> str:
    return pwd.getpwuid(os.geteuid() if user is None else user).pw_name


def system_folder() -> Path:
    """The folder that root shares with the account; made if it is not there."""
    try:
        if not SYSTEM_FOLDER.exists():
            SYSTEM_FOLDER.mkdir(parents=True)
            SYSTEM_FOLDER.chmod(0o755)
    except OSError as error:
        raise ConfigurationError(
            f"{SYSTEM_FOLDER} cannot be made ({error.strerror}). Set data_dir to a folder that "
            "every user may pass through, start as another user, or set DATABASE_URL."
        ) from error
    return SYSTEM_FOLDER
