"""Opens a run's document: its bytes from the document store, its pages from the render child."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from celery import signals

from rag_service.config.loader import get_settings
from rag_service.errors import CorruptPdf, StorageUnavailable, StoreUnreachable
from rag_service.jobs.leases import ClaimedRun
from rag_service.pdf.results import Preflight
from rag_service.pdf.session import PdfSession
from rag_service.runtime.process_resources import require_resources
from workers.store_watch import document_store

log = logging.getLogger(__name__)

_WAITS_FOR_STORE = (1.0, 5.0, 20.0)


@cache
def _pdf_session() -> PdfSession:
    """Return the fork's one render child, kept from document to document on its event loop."""
    settings = get_settings()
    session = PdfSession(settings.pdf, settings.limits.max_pages)
    # A child that is killed while this fork waits for a message must not stay as a zombie.
    signal.signal(signal.SIGCHLD, lambda *_: session.reap())
    # In order: a child that outlives this fork by a moment has no parent that reaps it.
    signals.worker_process_shutdown.connect(lambda **_: session.kill(), weak=False)
    return session


@dataclass(frozen=True, slots=True)
class OpenDocument:
    """A document that the render child has open, and the path of its bytes."""

    pdf: PdfSession
    preflight: Preflight
    path: Path


@asynccontextmanager
async def opened(run: ClaimedRun) -> AsyncIterator[OpenDocument]:
    """Open the run's document in the render child.

    Raises SourceMissing, StoreUnreachable, StorageUnavailable after four tries, ProcessInTrouble,
    and what PdfSession.open raises.
    """
    with ExitStack() as stack:
        yield await _open_with_retries(run, stack)


async def _open_with_retries(run: ClaimedRun, stack: ExitStack) -> OpenDocument:
    for wait in _WAITS_FOR_STORE:
        try:
            return await _open(run, stack)
        except StorageUnavailable as error:
            if isinstance(error, StoreUnreachable):
                raise
            require_resources(None)
            log.warning("Cannot read %s, trying again in %.0f s: %s", run.source_key, wait, error)
        await asyncio.sleep(wait)
    return await _open(run, stack)


async def _open(run: ClaimedRun, stack: ExitStack) -> OpenDocument:
    path = await _open_local(run.source_key, stack)
    try:
        preflight = await _pdf_session().open(path, run.media_type, spent=run.spent)
    except CorruptPdf as error:
        await asyncio.to_thread(document_store().require_reachable)
        if path.exists():
            raise
        raise StorageUnavailable("The file was removed while it was opened.") from error
    return OpenDocument(_pdf_session(), preflight, path)


async def _open_local(key: str, stack: ExitStack) -> Path:
    opening = document_store().open_local(key)
    return await asyncio.to_thread(stack.enter_context, opening)
