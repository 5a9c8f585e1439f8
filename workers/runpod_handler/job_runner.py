"""Run one job from its input to its answer."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from rag_service.config.options import Settings
from rag_service.errors import OcrOutage
from rag_service.ocr.concurrency.limiter import limiter_for
from rag_service.ocr.ocr_client import OcrClient
from rag_service.pdf.media_type import HEAD_BYTES, media_type_of
from rag_service.pdf.session import PdfSession
from rag_service.runpod.job_format import JobInput, JobOutput
from rag_service.states import LayoutMode
from workers.runpod_handler import gauge_recorder, page_reading
from workers.runpod_handler.debug_lines import DebugLines
from workers.runpod_handler.faults import (
    BadDocument,
    InvalidJob,
    PagesMismatch,
    ServerUnhealthy,
    UnsupportedLayout,
    UnsupportedVersion,
)
from workers.runpod_handler.gauge_recorder import GaugeRecord
from workers.runpod_handler.job_answer import fitted
from workers.runpod_handler.job_document import document_bytes
from workers.runpod_handler.page_reading import JobResults
from workers.runpod_handler.progress_updates import Progress, reported
from workers.runpod_handler.server_process import ServerProcess
from workers.runpod_handler.volume import Claim, Volume

log = logging.getLogger(__name__)

VERSION = 1
T = TypeVar("T")


def parse_input(raw: Any) -> JobInput:
    """Return the job's input. Raises UnsupportedVersion, InvalidJob."""
    version = raw.get("version") if isinstance(raw, dict) else None
    if version != VERSION:
        raise UnsupportedVersion(
            f"The job's version is {version!r}; this handler supports version 1."
        )
    try:
        job = JobInput.model_validate(raw)
    except ValidationError as error:
        raise InvalidJob(f"The job's input is not valid: {_problems(error)}") from error
    if not job.pages or len(set(job.pages)) != len(job.pages) or min(job.pages) < 1:
        raise InvalidJob("`pages` must name at least one page, each once, from 1.")
    return job


class JobRunner:
    """Run jobs with the OCR server in this worker, one at a time."""

    def __init__(self, settings: Settings, server: ServerProcess, debug: DebugLines) -> None:
        self._settings = settings
        self._server = server
        self._debug = debug
        self._volume = Volume(settings.handler, settings.runpod.ttl)

    async def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return the job's answer. Raises RagServiceError if there is none."""
        started = time.monotonic()
        work = parse_input(job.get("input"))
        log.info("Job %s: %d pages of %s", job["id"], len(work.pages), work.filename)
        self._require_layout(work)
        await self._require_healthy()
        async with self._volume.claimed(work.request_key) as claim:
            waited = time.monotonic() - started
            results, record = await self._while_server_runs(self._results(job, work, claim))
        seconds = {"waited": waited, "total": time.monotonic() - started}
        return self._answer(work, results, record, seconds)

    def _require_layout(self, work: JobInput) -> None:
        wanted, available = work.options.layout, self._settings.ocr.layout
        if wanted is LayoutMode.REGIONS and available is LayoutMode.PAGE:
            raise UnsupportedLayout(
                "This endpoint has no layout server (its ocr.layout is `page`): "
                "it cannot read pages with layout `regions`; use `page` or `auto`."
            )

    async def _require_healthy(self) -> None:
        if self._server.ended:
            raise ServerUnhealthy(self._server.ended)
        async with OcrClient(self._settings.ocr, connections=1) as client:
            probe = await client.probe()
        if not probe.ok:
            message = f"The OCR server failed its probe: {probe.message}"
            raise ServerUnhealthy(self._server.ended or message)

    async def _while_server_runs(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the work's result; stop the work if the server ends first."""
        working = asyncio.ensure_future(work)
        ended = asyncio.ensure_future(self._server.wait_ended())
        try:
            await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise ServerUnhealthy(ended.result())
        except OcrOutage as error:
            message = f"The OCR server stopped reading pages: {error.message}"
            raise ServerUnhealthy(self._server.ended or message) from error
        finally:
            for task in (working, ended):
                task.cancel()
            await asyncio.gather(working, ended, return_exceptions=True)

    async def _results(
        self, job: dict[str, Any], work: JobInput, claim: Claim
    ) -> tuple[JobResults, GaugeRecord]:
        limiter = limiter_for(self._settings, start=None, processes=1)
        progress = Progress(len(work.pages), lambda: limiter.most_pages)
        every = self._settings.handler.progress_every
        async with (
            reported(progress, job, every) as note,
            gauge_recorder.recorded(self._settings.ocr) as record,
        ):
            results = JobResults(work, claim, note)
            if stored := len(results.done):
                log.info(
                    "%d of %d pages are stored under this request key.", stored, len(work.pages)
                )
            if results.missing():
                await self._read(work, results)
        return results, record

    async def _read(self, work: JobInput, results: JobResults) -> None:
        handler = self._settings.handler
        data = await document_bytes(work.document, handler)
        media_type = media_type_of(data[:HEAD_BYTES])
        if media_type is None:
            raise BadDocument("The document is not a PDF, PNG, JPEG, TIFF or WebP file.")
        settings = page_reading.settings_for(self._settings, work.options.max_tokens)
        limits = self._settings.limits
        with tempfile.NamedTemporaryFile(prefix="job-") as file:
            await asyncio.to_thread(Path(file.name).write_bytes, data)
            async with PdfSession(settings.pdf, limits.max_pages) as pdf:
                preflight = await pdf.open(Path(file.name), media_type)
                if preflight.pages != len(work.pages):
                    raise PagesMismatch(
                        f"The document has {preflight.pages} pages, the job names "
                        f"{len(work.pages)}."
                    )
                await page_reading.read_pages(settings, work, pdf, results)

    def _answer(
        self, work: JobInput, results: JobResults, record: GaugeRecord, seconds: dict[str, float]
    ) -> dict[str, Any]:
        output = JobOutput(
            version=1,
            request_key=work.request_key,
            pages=page_reading.in_order(work, results.done),
            engine=results.engine.model_copy(update={"version": record.version}),
            gauges=record.gauges(),
            timings={name: round(value, 3) for name, value in seconds.items()},
            debug=self._debug.take(),
        )
        return fitted(output, self._settings.handler.max_output_bytes)


def _problems(error: ValidationError) -> str:
    """Name every bad key without its value, which may be a whole document."""
    problems = [
        f"{'.'.join(map(str, one['loc']))}: {one['msg']}"
        for one in error.errors(include_input=False)
    ]
    return "; ".join(problems)[:500]
