"""The queue `ocr`: a run's remaining pages through its parser, each stored as it ends."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import deque
from dataclasses import asdict
from datetime import datetime
from typing import Any

from rag_service.config.loader import get_settings
from rag_service.database.engine import DatabaseError, error_summary
from rag_service.errors import ConfigurationError, OcrMisconfigured
from rag_service.jobs import fork_loads, leases, limit_changes, run_pages, runs, server_state
from rag_service.jobs.fork_loads import TotalLoad
from rag_service.jobs.run_pages import PendingPage, StoredPage
from rag_service.jobs.server_state import ServerRecord
from rag_service.jobs.wake_ups import TASK_NAMES
from rag_service.ocr.concurrency.limiter import LimiterLoad, Together
from rag_service.parsers.contract import PageResult, PageTask, ParseJob, Region
from rag_service.parsers.registry import make_parser
from rag_service.states import ServerState, Stage
from workers.celery_app import app
from workers.document_source import opened
from workers.identity import ocr_server, worker_id
from workers.run_guard import RunGuard, Work
from workers.run_loop import work_on_next

log = logging.getLogger(__name__)

# How stale the shared note of the last answered page may be, and that of what is open.
_ANSWERED_NOTE_SECONDS = 2.0
_LOAD_NOTE_SECONDS = 5.0
# Of what may be open: now and then one place is empty.
_USED = 0.8


@app.task(bind=True, name=TASK_NAMES[Stage.OCR])
def read_pages(self: Any, run_id: str) -> str:  # noqa: ARG001
    """Answer a doorbell; the run it names is for the monitor's eyes only."""
    return work_on_next(Stage.OCR, self.request.id, read)


async def read(held: RunGuard) -> None:
    """Read what remains of the run. A wrong setting is an outage: no document is to blame."""
    try:
        await _reader()(held)
    except ConfigurationError as error:
        raise OcrMisconfigured(error.message) from error


def _reader() -> Work:
    """How this worker's pages travel."""
    if get_settings().ocr.transport == "direct":
        return read_run
    from workers.remote.remote_run import read_remotely

    return read_remotely


async def read_run(held: RunGuard) -> None:
    """Read the pages that remain; finish the run, or let it wait for a page's later try."""
    run = held.run
    due = [page for page in await held.call(lambda: run_pages.pending(run)) if not page.waits]
    if due:
        await _parse(held, due)
    if not await held.call(lambda: run_pages.pending(run)):
        await held.call(lambda: runs.finish(run))
        return
    wait = await held.call(lambda: run_pages.seconds_until_due(run))
    await held.call(lambda: leases.release(run, retry_in=wait))


async def _parse(held: RunGuard, due: list[PendingPage]) -> None:
    run = held.run
    parser = make_parser(run.parser, get_settings())
    job = ParseJob(
        run_id=run.id,
        model=run.model,
        dpi=run.dpi,
        layout=run.layout,
        pages=[PageTask(page.number, page.tries) for page in due],
    )
    async with opened(run) as document:
        try:
            await parser.parse(job, document.pdf, Sink(held, parser.version), Watch(held))
        finally:
            await asyncio.to_thread(_forget_load)


class Sink:
    """Stores a parser's pages under the run's claim."""

    def __init__(self, held: RunGuard, parser_version: str) -> None:
        self._held = held
        self._version = parser_version

    async def in_hand(self, number: int) -> None:
        """Note the page as in hand. Raises LeaseLost, Draining."""
        self._held.check_drain()
        run = self._held.run
        await self._held.call(lambda: run_pages.mark_in_progress(run, number))

    async def still_ours(self) -> None:
        """Raises LeaseLost where the run is ours no longer."""
        self._held.check()
        run = self._held.run
        await self._held.call(lambda: leases.require_valid(run))

    async def store(self, result: PageResult) -> None:
        """Raises LeaseLost."""
        run, page = self._held.run, self._stored(result)
        await self._held.call(lambda: run_pages.store(run, page))

    def _stored(self, result: PageResult) -> StoredPage:
        return StoredPage(
            number=result.number,
            state=result.state,
            markdown=result.markdown,
            columns={
                "finish_reason": result.finish_reason,
                "prompt_tokens": result.prompt_tokens,
                "completion_tokens": result.completion_tokens,
                "seconds": result.seconds,
                "engine": result.engine,
                "model": result.model,
                "dpi": result.dpi,
                "parser_version": self._version,
            },
            regions=[_travelling(region) for region in result.regions],
            warnings=[asdict(warning) for warning in result.warnings],
            error=result.error,
            retry_in=result.retry_in,
        )


def _travelling(region: Region) -> dict[str, Any]:
    """A region under the names that it has on the wire and in the API."""
    return {
        "index": region.index,
        "label": region.label,
        "bbox_2d": list(region.bbox),
        "content": region.content,
    }


class Watch:
    """What all workers together know of the OCR server."""

    def __init__(self, held: RunGuard) -> None:
        self._held = held
        self._noted_at = float("-inf")
        self._unnoted = False
        self._reported_at = float("-inf")
        self._reported = 0.0
        # Newest last: those that stay take a part over when they have heard twice that it is free.
        self._forks: deque[int] = deque([0, 0], maxlen=2)

    async def is_up(self) -> bool:
        """False while the server is out or on trial."""
        record = await self._record()
        return record is None or record.state is ServerState.UP

    async def last_answer(self) -> datetime | None:
        """When any worker last had a page answered, by the database's clock."""
        if self._unnoted:
            await self._note()
        record = await self._record()
        return record.last_success_at if record else None

    async def answered(self) -> None:
        """Note an answered page, at once where it is the first of this run."""
        self._unnoted = True
        if time.monotonic() - self._noted_at >= _ANSWERED_NOTE_SECONDS:
            await self._note()

    async def good_limit(self) -> float | None:
        """A fork's part of what was last right for this server."""
        together = await self._held.call(lambda: fork_loads.good_in_flight(_url()))
        return together and together / get_settings().ocr.worker_concurrency

    async def report(self, load: LimiterLoad) -> Together | None:
        """Note what is open, now and then; and what all together found to be right."""
        is_due = time.monotonic() - self._reported_at >= _LOAD_NOTE_SECONDS
        is_first_sent = load.in_flight > 0 and not self._reported
        if not (is_due or is_first_sent):
            return None
        self._reported = load.in_flight
        await self._held.call(
            lambda: fork_loads.report(_fork(), _url(), load.in_flight, load.limit)
        )
        changes = load.changes.take()
        await self._held.call(lambda: limit_changes.add(_fork(), _url(), changes))
        # Between two documents a fork is gone for a moment: who asks twice at once takes its part.
        if not is_due:
            return None
        self._reported_at = time.monotonic()
        fleet = await self._held.call(lambda: fork_loads.total(_url()))
        if load.is_settled and self._is_steady(fleet):
            good = (fleet.limit or 0.0) / get_settings().ocr.server_share
            await self._held.call(lambda: fork_loads.store_good_in_flight(_url(), good))
        return Together(fleet.forks, fleet.limit)

    def _is_steady(self, fleet: TotalLoad) -> bool:
        """Whether all forks use what they may: the last documents' forks say nothing."""
        is_stable = set(self._forks) == {fleet.forks}
        self._forks.append(fleet.forks)
        return is_stable and fleet.in_flight >= _USED * (fleet.limit or math.inf)

    async def _note(self) -> None:
        self._unnoted = False
        self._noted_at = time.monotonic()
        await self._held.call(lambda: server_state.mark_answered(_url()))

    async def _record(self) -> ServerRecord | None:
        return await self._held.call(lambda: server_state.get(_url()))


def _forget_load() -> None:
    """Nothing is open any more; what cannot be forgotten now lapses by itself."""
    try:
        fork_loads.remove(_fork())
    except DatabaseError as error:
        log.warning("What this fork had open is counted a little longer: %s", error_summary(error))


def _fork() -> str:
    return f"{worker_id(Stage.OCR)}:{os.getpid()}"


def _url() -> str:
    return ocr_server() or ""
