"""The routes that monitors ask: alive, ready. Part of the API."""

from __future__ import annotations

import asyncio
from functools import partial

import anyio
from fastapi import APIRouter, Response
from pydantic import BaseModel

from rag_service.api.resources import Here
from rag_service.monitoring import readiness
from rag_service.monitoring.readiness import Health, HealthStatus

router = APIRouter(prefix="/health", tags=["health"])


class Alive(BaseModel):
    status: str


@router.get("/live", summary="The process runs")
async def live() -> Alive:
    """Always 200, without a key: the process answers."""
    return Alive(status="alive")


@router.get(
    "/ready",
    summary="The service can do its work",
    responses={503: {"model": Health, "description": "PostgreSQL or the document store fails."}},
)
async def ready(here: Here, response: Response) -> Health:
    """200 while documents can be accepted and read back; `degraded` names what else is amiss:
    broker, ghostscript, prepare_worker, ocr_worker, maintenance, ocr_server, layout_server,
    no_gpu_workers, starved.
    """
    run = anyio.to_thread.run_sync
    database, storage, broker, layout = await asyncio.gather(
        run(readiness.database_faults),
        run(readiness.storage_faults, lambda: here.store),
        run(readiness.broker_faults, here.settings),
        run(readiness.layout_faults, here.settings),
    )
    fleet = [] if database else await run(partial(readiness.processing_faults, here.settings))
    shrinkers = readiness.shrinker_faults(here.settings)
    found = Health.of(database + storage, broker + shrinkers + layout + fleet)
    if found.status is HealthStatus.UNAVAILABLE:
        response.status_code = 503
    return found
