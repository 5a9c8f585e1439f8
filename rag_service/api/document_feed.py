"""Changes of documents for event streams: one reader of the database, however many streams.

A follower gets the newest version only, so a slow one neither fills memory nor delays others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import anyio

from rag_service.database.engine import DatabaseError, as_unavailable, error_summary
from rag_service.knowledgebase.views import DocumentView
from rag_service.states import TERMINAL

log = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
# The reader pauses for this many times the time that it read, so that it never fills a processor.
_PAUSE_FACTOR = 4
# They change with time, so a change of these alone is no event.
_CLOCKS = {"eta_seconds", "wait_seconds", "run_seconds"}

_Read = Callable[[Collection[str]], dict[str, DocumentView]]


@dataclass(frozen=True)
class DocumentVersion:
    """What a document looked like; `view` is None if it is unknown or deleted."""

    view: DocumentView | None

    @cached_property
    def json(self) -> str:
        return self.view.model_dump_json() if self.view else "null"

    @cached_property
    def without_clocks(self) -> dict[str, Any] | None:
        return self.view.model_dump(exclude=_CLOCKS) if self.view else None

    @property
    def has_ended(self) -> bool:
        return self.view is None or self.view.latest_run.status in TERMINAL


class Follower:
    """The versions of one document for one stream. Close it."""

    def __init__(self, document_id: str) -> None:
        self.document_id = document_id
        self.is_closed = False
        self._newest: DocumentVersion | None = None
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    async def next(self, seconds: float) -> DocumentVersion | None:
        """Return the newest version once there is another one; None after `seconds`, or if this
        is closed. The first one is read after the follower was made.

        Raises what the reader raised.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return None
        if self._error is not None:
            raise self._error
        version, self._newest = self._newest, None
        if not self.is_closed:
            self._changed.clear()
        return version

    def offer(self, version: DocumentVersion) -> None:
        self._newest = version
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._changed.set()

    def close(self) -> None:
        self.is_closed = True
        self._changed.set()


class DocumentFeed:
    """Reads all documents that are followed, about once a second, in one go.

    `read` returns documents by id; it is called in a thread. Use it inside one event loop.
    """

    def __init__(self, read: _Read) -> None:
        self._read = read
        self._followers: dict[str, set[Follower]] = {}
        self._versions: dict[str, DocumentVersion] = {}
        self._new: list[Follower] = []
        self._wake = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._stopped = False
        self._outage_logged = False

    def follow(self, document_id: str) -> Follower:
        """Return a follower of the document, which must be given back to `leave`."""
        follower = Follower(document_id)
        if self._stopped:
            follower.close()
            return follower
        self._followers.setdefault(document_id, set()).add(follower)
        self._new.append(follower)
        self._wake.set()
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._run())
        return follower

    def leave(self, follower: Follower) -> None:
        """Follow no longer. Without followers, nothing is read."""
        follower.close()
        others = self._followers.get(follower.document_id, set())
        others.discard(follower)
        if not others:
            self._followers.pop(follower.document_id, None)
            self._versions.pop(follower.document_id, None)

    def stop(self) -> None:
        """Close all followers, present and future ones; their streams end."""
        self._stopped = True
        for followers in self._followers.values():
            for follower in followers:
                follower.close()
        if self._reader is not None:
            self._reader.cancel()

    async def _run(self) -> None:
        due = time.monotonic()
        while self._followers:
            is_due = time.monotonic() >= due
            new, self._new = self._new, []
            self._wake.clear()
            started = time.monotonic()
            ids = set(self._followers) if is_due else {one.document_id for one in new}
            if ids:
                await self._update(ids, new)
            if is_due:
                took = time.monotonic() - started
                due = started + max(_POLL_SECONDS, took * (1 + _PAUSE_FACTOR))
            await self._sleep_until(due)

    async def _sleep_until(self, due: float) -> None:
        """Sleep, but no longer than until there is a new follower."""
        try:
            async with asyncio.timeout(max(0.0, due - time.monotonic())):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _update(self, ids: Collection[str], new: Collection[Follower]) -> None:
        try:
            views = await anyio.to_thread.run_sync(self._read, ids)
        except DatabaseError as error:
            # Streams that are open stay open through an outage.
            self._fail(error, new if as_unavailable(error) else self._all())
        except Exception as error:
            self._fail(error, self._all())
        else:
            self._outage_logged = False
            for document_id in ids:
                self._publish(document_id, DocumentVersion(views.get(document_id)), new)

    def _publish(self, document_id: str, now: DocumentVersion, new: Collection[Follower]) -> None:
        followers = self._followers.get(document_id)
        if not followers:
            return
        before = self._versions.get(document_id)
        changed = before is None or before.without_clocks != now.without_clocks
        self._versions[document_id] = now
        for follower in followers if changed else followers.intersection(new):
            follower.offer(now)

    def _fail(self, error: Exception, followers: Collection[Follower]) -> None:
        if not self._outage_logged:
            reason = error_summary(error) if isinstance(error, DatabaseError) else repr(error)
            log.warning("Event streams get no changes for now: %s", reason)
            self._outage_logged = True
        for follower in followers:
            follower.fail(error)

    def _all(self) -> list[Follower]:
        return [one for followers in self._followers.values() for one in followers]
