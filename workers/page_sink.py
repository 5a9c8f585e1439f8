"""Stores the pages that a parser hands over, under the run's claim."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from rag_service.jobs import leases, run_pages
from rag_service.jobs.run_pages import StoredPage
from rag_service.parsers.contract import PageResult, Region
from rag_service.pdf.session import PdfSession
from rag_service.runtime.process_resources import require_resources
from workers.run_guard import RunGuard
from workers.store_watch import document_store


class DatabasePageSink:
    """A PageSink that writes to the database while the run's lease is valid."""

    def __init__(self, guard: RunGuard, pdf: PdfSession, parser_version: str) -> None:
        self._guard = guard
        self._pdf = pdf
        self._version = parser_version

    async def begin_page(self, number: int) -> None:
        """Note that work on the page begins. Raises LeaseLost, Draining."""
        self._guard.check_drain()
        run = self._guard.run
        await self._guard.call(lambda: run_pages.mark_in_progress(run, number))

    async def require_lease(self) -> None:
        """Raise LeaseLost if the lease is no longer valid."""
        self._guard.check()
        run = self._guard.run
        await self._guard.call(lambda: leases.require_valid(run))

    async def store(self, result: PageResult) -> None:
        """Store the page. Raises LeaseLost.

        Instead of a page error it raises ProcessInTrouble or StoreUnreachable if that is the cause.
        """
        if result.error is not None or result.retry_in is not None:
            require_resources(result.error)
            await asyncio.to_thread(document_store().require_reachable)
        run, page, spent = self._guard.run, self._stored(result), self._pdf.spent
        await self._guard.call(lambda: run_pages.store(run, page, spent))

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
            regions=[_as_json(region) for region in result.regions],
            warnings=[asdict(warning) for warning in result.warnings],
            error=result.error,
            retry_in=result.retry_in,
        )


def _as_json(region: Region) -> dict[str, Any]:
    """Return a region under the field names of the API and of RunPod jobs."""
    return {
        "index": region.index,
        "label": region.label,
        "bbox_2d": list(region.bbox),
        "content": region.content,
    }
