"""Health of everything that the service needs.

Without PostgreSQL or the document store nothing works. Any other fault only makes documents wait,
and its message says which.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC
from enum import StrEnum

from pydantic import BaseModel, Field

from rag_service.config.options import Settings
from rag_service.database import schema
from rag_service.database.engine import (
    DatabaseError,
    as_unavailable,
    error_summary,
    ping,
)
from rag_service.errors import ConfigurationError, RagServiceError
from rag_service.jobs import held_stages, live_workers, server_samples, server_state, wake_ups
from rag_service.layout.address import is_known
from rag_service.layout.layout_client import readiness
from rag_service.monitoring import disk_space
from rag_service.monitoring.store_check import StoreCheck
from rag_service.pdf import shrink
from rag_service.runtime.process_resources import find_shortage
from rag_service.states import ServerState, Stage


class Fault(BaseModel):
    """A fault and its effect."""

    name: str = Field(description="A stable name of the fault.", examples=["ocr_worker"])
    message: str = Field(description="What is wrong, its effect, and the way out.")


class HealthStatus(StrEnum):
    READY = "ready"
    DEGRADED = "degraded"
    UNAVAILABLE = "unavailable"


class Health(BaseModel):
    """The faults by effect: `failed` stops the service, `degraded` makes documents wait."""

    status: HealthStatus = Field(description="The worst effect of the faults.")
    failed: list[Fault] = Field(description="Faults that stop the service.")
    degraded: list[Fault] = Field(description="Faults that make documents wait.")

    @classmethod
    def of(cls, failed: list[Fault], degraded: list[Fault]) -> Health:
        if failed:
            return cls(status=HealthStatus.UNAVAILABLE, failed=failed, degraded=degraded)
        status = HealthStatus.DEGRADED if degraded else HealthStatus.READY
        return cls(status=status, failed=failed, degraded=degraded)


def database_faults() -> list[Fault]:
    """Return a fault if PostgreSQL does not answer, is read-only or lacks this version's tables."""
    try:
        ping()
        schema.require_migrated()
    except RagServiceError as error:
        return [Fault(name="database", message=error.message)]
    except DatabaseError as error:
        outage = as_unavailable(error)
        message = outage.message if outage else error_summary(error)
        return [Fault(name="database", message=message)]
    return []


def storage_faults(store: StoreCheck) -> list[Fault]:
    """Return a fault if the document store cannot be written to.

    Without PostgreSQL nothing is said about the store: which one is right is not known.
    """
    try:
        store.require()
    except RagServiceError as error:
        return [Fault(name="storage", message=error.message)]
    except DatabaseError:
        return []
    return []


def disk_faults(settings: Settings, store: StoreCheck) -> list[Fault]:
    """Return a fault for each disk that runs low."""
    low = disk_space.low_disks(settings, store.incoming_if_reachable())
    return [Fault(name="disk_low", message=message) for message in low]


def broker_faults(settings: Settings) -> list[Fault]:
    """Return a fault if the broker does not answer."""
    try:
        reason = wake_ups.ping(settings)
    except ConfigurationError as error:
        reason = error.message
    if reason is None:
        return []
    message = f"The broker takes no messages; documents are accepted and wait for it. {reason}"
    return [Fault(name="broker", message=message)]


def shrinker_faults(settings: Settings) -> list[Fault]:
    """Return a fault if Ghostscript, which shrinks scans for jobs, is needed and not installed."""
    if settings.ocr.transport != "runpod" or not settings.pdf.downsample_oversized:
        return []
    if shrink.Shrinker.GHOSTSCRIPT in shrink.shrinkers_available():
        return []
    return [Fault(name="ghostscript", message=shrink.MISSING)]


def layout_faults(settings: Settings) -> list[Fault]:
    """Return a fault if the layout server does not answer.

    It is checked if its URL is set or its socket exists on this node. Layout servers of other
    nodes cannot be checked here.
    """
    if not settings.uses_layout or not is_known(settings):
        return []
    state = readiness(settings)
    if state.ok:
        return []
    message = f"Pages that are read by regions wait for it. {state.message}"
    return [Fault(name="layout_server", message=message)]


def process_faults() -> list[Fault]:
    """Return a fault if this process lacks descriptors, threads, memory or scratch space."""
    short = find_shortage()
    if short is None:
        return []
    return [Fault(name="api", message=f"This API process is short of a resource: {short}.")]


def _store_faults() -> Iterator[Fault]:
    """Yield a fault for each worker whose machine cannot reach the document store."""
    for worker, message in live_workers.store_faults():
        yield Fault(name="worker_storage", message=f"{worker}: {message}")


def processing_faults(settings: Settings) -> list[Fault]:
    """Return the faults of workers, maintenance and the OCR server; needs PostgreSQL."""
    return [
        *_worker_faults(),
        *held_faults(settings),
        *_store_faults(),
        *_maintenance_faults(settings.maintenance.lease),
        *_server_faults(settings),
    ]


def held_faults(settings: Settings) -> list[Fault]:
    """Return a fault for each stage that documents hold for long; needs PostgreSQL."""
    held = held_stages.held_stages(settings.worker.held_after, settings.page_server)
    return [Fault(name=f"{one.stage}_held", message=one.message) for one in held]


def _worker_faults() -> Iterator[Fault]:
    for stage in Stage:
        live = live_workers.of_stage(stage)
        for worker in live:
            if worker.trouble:
                yield Fault(name=f"{stage}_worker", message=f"{worker.id}: {worker.trouble}")
        if not live:
            yield Fault(
                name=f"{stage}_worker",
                message=f"No heartbeat of a {stage} worker for {live_workers.ALIVE_SECONDS:g} s; "
                f"documents wait. Start one: rag-service worker {stage}",
            )


def _maintenance_faults(lease_seconds: float) -> Iterator[Fault]:
    silence = live_workers.maintenance_silence()
    if silence is not None and silence <= lease_seconds:
        return
    yield Fault(
        name="maintenance",
        message="No heartbeat of maintenance; work that a worker lost is not resumed. "
        "Start it: rag-service worker maintenance",
    )


def _server_faults(settings: Settings) -> Iterator[Fault]:
    if settings.page_server is None:
        yield Fault(name=server_state.FAULT, message=settings.unset_for_pages or "")
        return
    record = server_state.get(settings.page_server)
    if record is None:
        return
    is_out = record.state is not ServerState.UP
    if is_out:
        # Also during a trial: until a page is answered, all documents but one wait.
        yield Fault(name=server_state.FAULT, message=f"{record.state}: {record.message}")
    for name, message in record.alarms.items():
        if not (is_out and name == server_state.FAULT):
            yield Fault(name=name, message=message)
    starved = server_samples.starvation(record.url)
    if starved is not None and not is_out:
        since = starved.since.astimezone(UTC)
        yield Fault(name="starved", message=f"Since {since:%Y-%m-%d %H:%M} UTC: {starved.why}")
