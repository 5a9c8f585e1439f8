"""The task of the queue `ocr`: reads the remaining pages of a run with its parser."""

from __future__ import annotations

import asyncio
from typing import Any

from rag_service.config.loader import get_settings
from rag_service.errors import ConfigurationError, OcrMisconfigured
from rag_service.jobs import leases, run_pages, runs
from rag_service.jobs.run_pages import PendingPage
from rag_service.jobs.wake_ups import TASK_NAMES
from rag_service.parsers.contract import PageTask, ParseJob
from rag_service.parsers.registry import make_parser
from rag_service.states import RunState, Stage
from workers.celery_app import app
from workers.document_source import opened
from workers.page_sink import DatabasePageSink
from workers.run_guard import RunGuard, Work
from workers.run_loop import work_on_next
from workers.server_watch import SharedServerWatch, remove_load
from workers.task_outcome import TASK_OPTIONS, end_task


@app.task(name=TASK_NAMES[Stage.OCR], **TASK_OPTIONS)
def read_pages(self: Any, run_id: str) -> str:  # noqa: ARG001
    """Handle a wake-up message. Its run ID is only for Flower: the best run is claimed."""
    return end_task(work_on_next(Stage.OCR, self.request.id, read))


async def read(guard: RunGuard) -> RunState:
    """Read the run's remaining pages. A wrong setting is an outage, not the document's failure."""
    try:
        return await _reader()(guard)
    except ConfigurationError as error:
        raise OcrMisconfigured(error.message) from error


def _reader() -> Work:
    """Return the function that reads pages over the configured transport."""
    if get_settings().ocr.transport == "direct":
        return read_run
    from workers.remote.remote_run import read_remotely

    return read_remotely


async def read_run(guard: RunGuard) -> RunState:
    """Read the remaining pages, then finish the run or release it until a page's later try."""
    run = guard.run
    due = [page for page in await guard.call(lambda: run_pages.pending(run)) if not page.waits]
    if due:
        await _parse(guard, due)
    if not await guard.call(lambda: run_pages.pending(run)):
        return await guard.call(lambda: runs.finish(run))
    wait = await guard.call(lambda: run_pages.seconds_until_due(run))
    await guard.call(lambda: leases.release(run, retry_in=wait))
    return RunState.READY


async def _parse(guard: RunGuard, due: list[PendingPage]) -> None:
    run = guard.run
    parser = make_parser(run.parser, get_settings())
    job = ParseJob(
        run_id=run.id,
        model=run.model,
        dpi=run.dpi,
        layout=run.layout,
        pages=[PageTask(page.number, page.tries) for page in due],
    )
    watch = SharedServerWatch(guard)
    async with opened(run) as document:
        sink = DatabasePageSink(guard, document.pdf, parser.version)
        try:
            await parser.parse(job, document.pdf, sink, watch)
        finally:
            await asyncio.to_thread(remove_load)
