"""Downloads the weights of PP-DocLayoutV3 to a folder once.

They are two files of a public repository, so plain HTTPS is enough; the hub's library is not used.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from pathlib import Path

import httpx

from rag_service.errors import ConfigurationError
from rag_service.layout.model_loader import FILES

log = logging.getLogger(__name__)

_TIMEOUT = httpx.Timeout(60.0, connect=10.0)
_CHUNK = 1 << 20
# The hub's header for the SHA-256 of a large file, on the response that redirects to its bytes.
_DIGEST_HEADER = "x-linked-etag"


def ensure_model(folder: Path, repo: str) -> bool:
    """Download the weights if they are not there. Return True if they were there already.

    The folder appears complete or not at all, also if several processes download at once.
    Raises ConfigurationError if the weights cannot be downloaded.
    """
    if _is_whole(folder):
        return True
    log.warning("No layout model in %s; it is downloaded from %s.", folder, repo)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as name:
            fresh = Path(name) / folder.name
            fresh.mkdir()
            _download(repo, fresh)
            _move_in(fresh, folder)
    except (OSError, httpx.HTTPError) as error:
        raise ConfigurationError(
            f"layout.folder: the layout model cannot be downloaded from {repo} to {folder}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return False


def _is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def _download(repo: str, folder: Path) -> None:
    with httpx.Client(timeout=_TIMEOUT, follow_redirects=True) as http:
        for name in FILES:
            with http.stream("GET", f"{repo}/resolve/main/{name}") as response:
                response.raise_for_status()
                _write(response, folder / name)


def _write(response: httpx.Response, file: Path) -> None:
    """Write the body. Raises httpx.HTTPError if it breaks off, OSError if its hash is wrong."""
    digest = hashlib.sha256()
    with file.open("wb") as output:
        for chunk in response.iter_bytes(_CHUNK):
            digest.update(chunk)
            output.write(chunk)
    first = [*response.history, response][0]
    wanted = first.headers.get(_DIGEST_HEADER, "").strip('"')
    if wanted and wanted != digest.hexdigest():
        raise OSError(f"the SHA-256 of {file.name} is not the repository's")


def _move_in(fresh: Path, folder: Path) -> None:
    try:
        fresh.rename(folder)
    except OSError:
        # Another process may have been first; anything else at that path is an error.
        if not _is_whole(folder):
            raise
