"""Work done once under a request key, kept on the network volume that all workers share.

A key has a folder. The owner of its work is whoever made the `owner` file of the highest number;
it keeps writing into that file. A waiting worker that has seen no change of it for
handler.stale_after makes the next file, which only one can, and goes on from the stored pages.
No two machines' clocks are compared. Used by jobs; also made without a volume.
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
from workers.runpod_handler.faults import ClaimLost

log = logging.getLogger(__name__)

_POLL = 0.5
_WORKING, _RELEASED = b"working ", b"released"
_OWNER = re.compile(r"owner\.(\d{6})")


class _Owner(NamedTuple):
    """The latest claim on a key: number 0 where there has been none."""

    number: int
    said: bytes


class Claim:
    """The right to work on a key, for as long as nobody has taken it over."""

    def __init__(self, folder: Path | None, number: int, beat_every: float) -> None:
        self._folder = folder
        self._number = number
        self._beat_every = beat_every
        self._beats = 0

    def pages(self) -> dict[int, PageOutput]:
        """The pages that are done under this key already."""
        if self._folder is None:
            return {}
        found = (_read_page(path) for path in self._folder.glob("page-*.json"))
        return {page.page: page for page in found if page is not None}

    async def keep(self, page: PageOutput) -> None:
        """Store a page that was read; one with an error is not kept. Raises ClaimLost."""
        await self.still_ours()
        if self._folder is not None and page.error is None:
            await asyncio.to_thread(_write_page, self._folder, page)

    async def still_ours(self) -> None:
        """Raises ClaimLost where another job has taken the key over."""
        if self._folder is None:
            return
        latest = await asyncio.to_thread(_latest_owner, self._folder)
        if latest.number != self._number:
            raise ClaimLost()

    async def beat(self) -> None:
        """Show for ever that the owner is alive."""
        while True:
            try:
                await asyncio.to_thread(self._say, _WORKING)
            except OSError as error:
                log.warning("The volume does not take a sign of life: %s", error)
            await asyncio.sleep(self._beat_every)

    def release(self) -> None:
        """Let the next one have the key at once."""
        try:
            self._say(_RELEASED)
        except OSError as error:
            log.warning("The key is not released and is free only later: %s", error)

    def _say(self, state: bytes) -> None:
        """In place, so that a reader who opens the file sees it on a network file system too."""
        if self._folder is None:
            return
        self._beats += 1
        with _owner_file(self._folder, self._number).open("r+b") as file:
            file.write(state + b"%012d" % self._beats)
            file.flush()
            os.fsync(file.fileno())


class Volume:
    """The keys of one shared folder, or of none."""

    def __init__(self, handler: HandlerOptions, ttl: float) -> None:
        """`ttl`: seconds that a key's work is kept after its last change."""
        there = handler.volume.parent.is_dir()
        self._keys = handler.volume / "keys" if there else None
        self._handler = handler
        self._ttl = ttl

    @asynccontextmanager
    async def claimed(self, request_key: str) -> AsyncIterator[Claim]:
        """The key's claim, once nobody else works on it."""
        if self._keys is None:
            yield Claim(None, 0, self._handler.heartbeat)
            return
        folder = self._keys / hashlib.sha256(request_key.encode()).hexdigest()
        await asyncio.to_thread(self._prepare, folder)
        claim = Claim(folder, await self._take(folder), self._handler.heartbeat)
        beating = asyncio.create_task(claim.beat())
        try:
            yield claim
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            claim.release()

    def _prepare(self, folder: Path) -> None:
        self._sweep()
        folder.mkdir(parents=True, exist_ok=True)

    async def _take(self, folder: Path) -> int:
        """Wait until the key is free, released or abandoned; the number of our claim."""
        seen, since = _Owner(0, b""), time.monotonic()
        while True:
            latest = await asyncio.to_thread(_latest_owner, folder)
            if latest != seen:
                self._say_why(latest, seen)
                seen, since = latest, time.monotonic()
            silent = time.monotonic() - since >= self._handler.stale_after
            if latest.number == 0 or latest.said.startswith(_RELEASED) or silent:
                if await asyncio.to_thread(_made_owner, folder, latest.number + 1):
                    return latest.number + 1
            else:
                await asyncio.sleep(_POLL)

    def _say_why(self, latest: _Owner, seen: _Owner) -> None:
        if latest.number != seen.number and not latest.said.startswith(_RELEASED):
            log.info("Another job works on this key (claim %d); waiting for it.", latest.number)

    def _sweep(self) -> None:
        """Remove keys whose last change is older than the ttl; a living owner's never is."""
        if self._keys is None or not self._keys.is_dir():
            return
        for folder in self._keys.iterdir():
            with contextlib.suppress(FileNotFoundError):
                newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
                if time.time() - newest > self._ttl:
                    shutil.rmtree(folder, ignore_errors=True)


def _owner_file(folder: Path, number: int) -> Path:
    return folder / f"owner.{number:06d}"


def _latest_owner(folder: Path) -> _Owner:
    names = (path.name for path in folder.iterdir())
    numbers = [int(match[1]) for name in names if (match := _OWNER.fullmatch(name))]
    number = max(numbers, default=0)
    return _Owner(number, _owner_file(folder, number).read_bytes() if number else b"")


def _made_owner(folder: Path, number: int) -> bool:
    """Whether this claim is ours: a file can be made exclusively by one only."""
    try:
        with _owner_file(folder, number).open("xb") as file:
            file.write(_WORKING)
    except FileExistsError:
        return False
    return True


def _write_page(folder: Path, page: PageOutput) -> None:
    """Whole or not at all."""
    half = folder / f"page-{page.page:06d}.half"
    half.write_text(page.model_dump_json())
    half.replace(half.with_suffix(".json"))


def _read_page(path: Path) -> PageOutput | None:
    try:
        return PageOutput.model_validate_json(path.read_bytes())
    except (ValidationError, OSError) as error:
        log.warning("A stored page is not readable and is read again: %s: %s", path.name, error)
        return None
