"""What the service needs and whether it is there. Used by /health/ready and the CLI.

Without PostgreSQL or the document store nothing works. Everything else only makes documents
wait, and each such thing says what waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from enum import StrEnum

from pydantic import BaseModel

from rag_service.config.options import Settings
from rag_service.database import schema
from rag_service.database.engine import begin, ping
from rag_service.documents.storage import DocumentStore
from rag_service.errors import ConfigurationError, RagServiceError
from rag_service.jobs import live_workers, server_samples, server_state, wake_ups
from rag_service.layout.address import is_known
from rag_service.layout.layout_client import readiness
from rag_service.pdf import shrink
from rag_service.states import ServerState, Stage


class Fault(BaseModel):
    """One thing that is not as it should be, and what that means."""

    name: str
    message: str


class HealthStatus(StrEnum):
    READY = "ready"
    DEGRADED = "degraded"
    UNAVAILABLE = "unavailable"


class Health(BaseModel):
    """`failed` stops everything, `degraded` makes documents wait."""

    status: HealthStatus
    failed: list[Fault]
    degraded: list[Fault]

    @classmethod
    def of(cls, failed: list[Fault], degraded: list[Fault]) -> Health:
        if failed:
            return cls(status=HealthStatus.UNAVAILABLE, failed=failed, degraded=degraded)
        status = HealthStatus.DEGRADED if degraded else HealthStatus.READY
        return cls(status=status, failed=failed, degraded=degraded)


def database_faults() -> list[Fault]:
    """PostgreSQL answers and has this version's tables."""
    try:
        ping()
        schema.require_migrated()
    except RagServiceError as error:
        return [Fault(name="database", message=error.message)]
    return []


def storage_faults(open_store: Callable[[], DocumentStore]) -> list[Fault]:
    """The document store takes bytes."""
    try:
        open_store().check()
    except RagServiceError as error:
        return [Fault(name="storage", message=error.message)]
    return []


def broker_faults(settings: Settings) -> list[Fault]:
    """The broker answers."""
    try:
        reason = wake_ups.ping(settings)
    except ConfigurationError as error:
        reason = error.message
    if reason is None:
        return []
    message = f"The broker is away; documents are accepted and wait for it. {reason}"
    return [Fault(name="broker", message=message)]


def shrinker_faults(settings: Settings) -> list[Fault]:
    """Scans too large for a job are shrunk by Ghostscript, where jobs are sent at all."""
    if settings.ocr.transport != "runpod" or not settings.pdf.downsample_oversized:
        return []
    if shrink.Shrinker.GHOSTSCRIPT in shrink.shrinkers_available():
        return []
    return [Fault(name="ghostscript", message=shrink.MISSING)]


def layout_faults(settings: Settings) -> list[Fault]:
    """The layout server answers, where it is known here: by its URL, or by this node's socket.

    Workers of other nodes have their own, of which nothing is known here.
    """
    if not settings.uses_layout or not is_known(settings):
        return []
    state = readiness(settings)
    if state.ok:
        return []
    message = f"Pages to be read block by block wait for it. {state.message}"
    return [Fault(name="layout_server", message=message)]


def fleet_faults(settings: Settings) -> list[Fault]:
    """Workers and maintenance were seen lately and the OCR server answers; needs PostgreSQL."""
    return [
        *_worker_faults(),
        *_maintenance_faults(settings.maintenance.lease),
        *_server_faults(settings),
    ]


def _worker_faults() -> Iterator[Fault]:
    for stage in Stage:
        if not live_workers.of_stage(stage):
            yield Fault(
                name=f"{stage}_worker",
                message=f"No {stage} worker was seen for {live_workers.ALIVE_SECONDS:g} s; its "
                f"documents wait. Start one: rag-service worker {stage}",
            )


def _maintenance_faults(lease_seconds: float) -> Iterator[Fault]:
    with begin() as connection:
        seen = live_workers.maintenance_seen_at(connection)
    if seen is not None and (datetime.now(UTC) - seen).total_seconds() <= lease_seconds:
        return
    yield Fault(
        name="maintenance",
        message="Maintenance was not seen lately; lost work is not taken up again. "
        "Start it: rag-service worker maintenance",
    )


def _server_faults(settings: Settings) -> Iterator[Fault]:
    if settings.page_server is None:
        yield Fault(name=server_state.FAULT, message=settings.unset_for_pages or "")
        return
    record = server_state.get(settings.page_server)
    if record is None:
        return
    out = record.state is not ServerState.UP
    if out:
        # On trial too: until a page is answered all documents but one wait.
        yield Fault(name=server_state.FAULT, message=f"{record.state}: {record.message}")
    for name, message in record.alarms.items():
        if not (out and name == server_state.FAULT):
            yield Fault(name=name, message=message)
    starved = server_samples.starvation(record.url)
    if starved is not None and not out:
        since = starved.since.astimezone(UTC)
        yield Fault(name="starved", message=f"Since {since:%Y-%m-%d %H:%M} UTC: {starved.why}")
