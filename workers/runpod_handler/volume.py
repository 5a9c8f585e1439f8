"""Do the work of a request key once, with results on the network volume that all workers share.

A key has a folder. The worker that created the `owner` file with the highest number owns the
key and keeps writing heartbeats into that file. A waiting worker that sees no change of the file
for handler.stale_after creates the next one, which only one worker can do, and continues from the
stored pages. Clocks of different machines are never compared. Without a volume nothing is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from rag_service.config.options import HandlerOptions
from rag_service.runpod.job_format import PageOutput
from rag_service.runtime.clocks import file_system_clock
from workers.runpod_handler.faults import ClaimLost

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_WORKING, _RELEASED = b"working ", b"released"
_OWNER = re.compile(r"owner\.(\d{6})")


class _Owner(NamedTuple):
    """The latest claim on a key and its file's content; number 0 if there has been none."""

    number: int
    content: bytes


class Claim:
    """The right to work on a key until another job takes it over."""

    def __init__(self, folder: Path | None, number: int, heartbeat_every: float) -> None:
        self._folder = folder
        self._number = number
        self._heartbeat_every = heartbeat_every
        self._heartbeats = 0

    def pages(self) -> dict[int, PageOutput]:
        """Return the pages that are stored under this key."""
        if self._folder is None:
            return {}
        found = (_read_page(path) for path in self._folder.glob("page-*.json"))
        return {page.page: page for page in found if page is not None}

    async def keep(self, page: PageOutput) -> None:
        """Store a page that was read, but not one with an error. Raises ClaimLost."""
        await self.require_valid()
        if self._folder is not None and page.error is None:
            await asyncio.to_thread(_write_page, self._folder, page)

    async def require_valid(self) -> None:
        """Raise ClaimLost if another job has taken the key over."""
        if self._folder is None:
            return
        latest = await asyncio.to_thread(_latest_owner, self._folder)
        if latest.number != self._number:
            raise ClaimLost()

    async def send_heartbeats(self) -> None:
        """Write heartbeats until cancelled."""
        while True:
            try:
                await asyncio.to_thread(self._write_state, _WORKING)
            except OSError as error:
                log.warning("Cannot write a heartbeat to the volume: %s", error)
            await asyncio.sleep(self._heartbeat_every)

    def release(self) -> None:
        """Free the key at once for the next job."""
        try:
            self._write_state(_RELEASED)
        except OSError as error:
            log.warning("Cannot release the key; it is free after handler.stale_after: %s", error)

    def _write_state(self, state: bytes) -> None:
        """Write in place, so that a worker that opens the file on a network file system sees it."""
        if self._folder is None:
            return
        self._heartbeats += 1
        with _owner_file(self._folder, self._number).open("r+b") as file:
            file.write(state + b"%012d" % self._heartbeats)
            file.flush()
            os.fsync(file.fileno())


class Volume:
    """The request keys in one shared folder, if there is one."""

    def __init__(self, handler: HandlerOptions, ttl: float) -> None:
        """`ttl`: seconds that a key's results are kept after their last change."""
        mounted = handler.volume.parent.is_dir()
        self._keys = handler.volume / "keys" if mounted else None
        self._handler = handler
        self._ttl = ttl

    @asynccontextmanager
    async def claimed(self, request_key: str) -> AsyncIterator[Claim]:
        """Claim the key as soon as no other worker holds it."""
        if self._keys is None:
            yield Claim(None, 0, self._handler.heartbeat)
            return
        folder = self._keys / hashlib.sha256(request_key.encode()).hexdigest()
        await asyncio.to_thread(self._prepare, folder)
        claim = Claim(folder, await self._take(folder), self._handler.heartbeat)
        heartbeats = asyncio.create_task(claim.send_heartbeats())
        try:
            yield claim
        finally:
            heartbeats.cancel()
            await asyncio.gather(heartbeats, return_exceptions=True)
            claim.release()

    def _prepare(self, folder: Path) -> None:
        self._remove_expired()
        folder.mkdir(parents=True, exist_ok=True)

    async def _take(self, folder: Path) -> int:
        """Wait until the key is free, released or abandoned; return the number of the new claim."""
        seen, since = _Owner(0, b""), time.monotonic()
        while True:
            latest = await asyncio.to_thread(_latest_owner, folder)
            if latest != seen:
                self._log_owner(latest, seen)
                seen, since = latest, time.monotonic()
            abandoned = time.monotonic() - since >= self._handler.stale_after
            if latest.number == 0 or latest.content.startswith(_RELEASED) or abandoned:
                if await asyncio.to_thread(_create_owner, folder, latest.number + 1):
                    return latest.number + 1
            else:
                await asyncio.sleep(_POLL_SECONDS)

    def _log_owner(self, latest: _Owner, seen: _Owner) -> None:
        if latest.number != seen.number and not latest.content.startswith(_RELEASED):
            log.info("Another job works on this key (claim %d); waiting for it.", latest.number)

    def _remove_expired(self) -> None:
        """Remove keys unchanged for the ttl; the heartbeats of a live owner keep its key."""
        if self._keys is None or not self._keys.is_dir():
            return
        # The volume's clock is not this worker's.
        now = file_system_clock(self._keys)
        for folder in self._keys.iterdir():
            with contextlib.suppress(FileNotFoundError):
                newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
                if now - newest > self._ttl:
                    shutil.rmtree(folder, ignore_errors=True)


def _owner_file(folder: Path, number: int) -> Path:
    return folder / f"owner.{number:06d}"


def _latest_owner(folder: Path) -> _Owner:
    names = (path.name for path in folder.iterdir())
    numbers = [int(match[1]) for name in names if (match := _OWNER.fullmatch(name))]
    number = max(numbers, default=0)
    return _Owner(number, _owner_file(folder, number).read_bytes() if number else b"")


def _create_owner(folder: Path, number: int) -> bool:
    """Create an owner file exclusively; return False if another worker was first."""
    try:
        with _owner_file(folder, number).open("xb") as file:
            file.write(_WORKING)
    except FileExistsError:
        return False
    return True


def _write_page(folder: Path, page: PageOutput) -> None:
    """Write the file whole or not at all."""
    half = folder / f"page-{page.page:06d}.half"
    half.write_text(page.model_dump_json())
    half.replace(half.with_suffix(".json"))


def _read_page(path: Path) -> PageOutput | None:
    try:
        return PageOutput.model_validate_json(path.read_bytes())
    except (ValidationError, OSError) as error:
        log.warning("Stored page %s is not readable; reading the page again: %s", path.name, error)
        return None
