"""The health routes: live, ready."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Literal

import anyio
from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from rag_service.api.resources import Resources
from rag_service.monitoring import readiness
from rag_service.monitoring.readiness import Health, HealthStatus

router = APIRouter(prefix="/health", tags=["health"])


class LivenessView(BaseModel):
    status: Literal["alive"] = Field(default="alive", description="Always `alive`.")


@router.get("/live", summary="Liveness of the process")
async def live() -> LivenessView:
    """Return 200 while the process answers. No key is needed."""
    return LivenessView()


@router.get(
    "/ready",
    summary="Readiness of the service",
    responses={
        503: {"model": Health, "description": "PostgreSQL or the document store does not work."}
    },
)
async def ready(resources: Resources, response: Response) -> Health:
    """Return 200 if documents can be added and read, else 503 with the causes in `failed`.

    `degraded` lists what makes documents wait: broker, ghostscript, prepare_worker, ocr_worker,
    maintenance, ocr_server, layout_server, no_gpu_workers, lost_answers,
    starved, api, worker_storage, disk_low, prepare_held, ocr_held.
    """
    run = anyio.to_thread.run_sync
    database, storage, broker, layout = await asyncio.gather(
        run(readiness.database_faults),
        run(readiness.storage_faults, resources.store_check),
        run(readiness.broker_faults, resources.settings),
        run(readiness.layout_faults, resources.settings),
    )
    fleet = [] if database else await run(partial(readiness.processing_faults, resources.settings))
    disks = await run(readiness.disk_faults, resources.settings, resources.store_check)
    shrinkers = readiness.shrinker_faults(resources.settings)
    own = readiness.process_faults()
    found = Health.of(database + storage, broker + shrinkers + layout + fleet + own + disks)
    if found.status is HealthStatus.UNAVAILABLE:
        response.status_code = 503
    return found
