"""The task of the queue `prepare`: preflight, reused pages, page plans. Stores native pages."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from rag_service.jobs import run_pages, runs, wake_ups
from rag_service.jobs.run_pages import PlannedRow
from rag_service.jobs.wake_ups import TASK_NAMES
from rag_service.pdf.results import PdfWarning, PlannedPage
from rag_service.runtime.process_resources import require_resources
from rag_service.states import OcrMode, PagePlan, PageState, RunState, Stage
from workers.celery_app import app
from workers.document_source import OpenDocument, opened
from workers.run_guard import RunGuard
from workers.run_loop import work_on_next
from workers.store_watch import document_store
from workers.task_outcome import TASK_OPTIONS, end_task

# Pages in one transaction, and the longest that a page waits for others. They bound the memory used
# and the work that a crash can cost.
_WINDOW, _WINDOW_SECONDS = 64, 3.0


@app.task(name=TASK_NAMES[Stage.PREPARE], **TASK_OPTIONS)
def prepare(self: Any, run_id: str) -> str:  # noqa: ARG001
    """Handle a wake-up message. Its run ID is only for Flower: the best run is claimed."""
    return end_task(work_on_next(Stage.PREPARE, self.request.id, prepare_run))


async def prepare_run(guard: RunGuard) -> RunState:
    """Plan every page of the run, then finish it or hand it to the ocr stage."""
    run = guard.run
    if run.reuse_pages:
        await guard.call(lambda: run_pages.reuse(run))
    async with opened(run) as document:
        preflight = document.preflight
        guard.page_count = preflight.pages
        warnings = [_warning(warning) for warning in preflight.warnings]
        known = await guard.call(lambda: runs.store_preflight(run, preflight.pages, warnings))
        missing = [n for n in range(1, preflight.pages + 1) if n not in known]
        remains, last = await _plan_pages(guard, document, missing)
    if remains or PageState.PENDING in known.values():
        await guard.call(lambda: runs.hand_to_ocr(run, last))
        wake_ups.notify(Stage.OCR, run.id, run.filename)
        return RunState.READY
    return await guard.call(lambda: runs.finish(run, last))


async def _plan_pages(
    guard: RunGuard, document: OpenDocument, missing: Sequence[int]
) -> tuple[bool, list[PlannedRow]]:
    """Plan these pages and store every window of them but the last.

    Returns whether any page needs OCR, and the last, unstored pages. The caller stores them in
    the transaction that moves the run on: most documents are shorter than a window, and a
    transaction costs as much as some pages.
    """
    run, remains = guard.run, False
    # Closed at once when the work stops: the render child must not read ahead in this document
    # when the next one opens.
    async with (
        aclosing(document.pdf.plan(OcrMode(run.ocr), missing)) as planned,
        aclosing(_windows(planned)) as windows,
    ):
        async for window, is_last in windows:
            if any(page.error for page in window):
                require_resources(None)
                await asyncio.to_thread(document_store().require_reachable)
            rows = [_row(page) for page in window]
            remains |= any(row.state is PageState.PENDING for row in rows)
            if is_last:
                return remains, rows
            await guard.call(partial(run_pages.store_plan, run, rows, document.pdf.spent))
            guard.check_drain()
    return remains, []


async def _windows(
    planned: AsyncIterator[PlannedPage],
) -> AsyncGenerator[tuple[Sequence[PlannedPage], bool]]:
    """Yield the pages in windows, and whether a window is the last one.

    A window does not wait for a slow page: it ends _WINDOW_SECONDS after its first page.
    """
    window: list[PlannedPage] = []
    due = math.inf
    arriving = asyncio.ensure_future(anext(planned, None))
    try:
        while True:
            wait = None if due == math.inf else max(0.0, due - time.monotonic())
            done, _ = await asyncio.wait({arriving}, timeout=wait)
            if done:
                page = arriving.result()
                if page is None:
                    yield window, True
                    return
                window.append(page)
                due = min(due, time.monotonic() + _WINDOW_SECONDS)
                arriving = asyncio.ensure_future(anext(planned, None))
            if len(window) == _WINDOW or not done:
                yield window, False
                window, due = [], math.inf
    finally:
        arriving.cancel()
        await asyncio.gather(arriving, return_exceptions=True)


def _row(page: PlannedPage) -> PlannedRow:
    return PlannedRow(
        number=page.number,
        plan=page.plan,
        plan_reason=page.reason,
        state=_state(page),
        width_pt=page.width_pt,
        height_pt=page.height_pt,
        markdown=page.markdown,
        warnings=[_warning(warning) for warning in page.warnings],
        error=page.error,
    )


def _state(page: PlannedPage) -> PageState:
    if page.error is not None:
        return PageState.FAILED
    if page.no_text:
        return PageState.NO_TEXT
    return {
        PagePlan.NATIVE: PageState.NATIVE,
        PagePlan.BLANK: PageState.BLANK,
        PagePlan.OCR: PageState.PENDING,
    }[PagePlan(page.plan)]


def _warning(warning: PdfWarning) -> dict[str, Any]:
    return {"code": warning.code, "message": warning.message}
