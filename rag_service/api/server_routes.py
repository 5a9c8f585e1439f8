"""The routes of the work as a whole: a summary, and the load of the OCR servers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from rag_service.api.problems import error_responses
from rag_service.api.query_parameters import KNOWN_PARAMETERS_ONLY
from rag_service.api.resources import Resources
from rag_service.jobs import limit_changes, server_samples
from rag_service.jobs.limit_changes import LimitChange
from rag_service.jobs.server_samples import DiagnosedSample
from rag_service.knowledgebase import summary_queries
from rag_service.knowledgebase.views import (
    LimitChangeView,
    SampleView,
    ServerView,
    SummaryView,
)

# Seven days.
_LONGEST_SECONDS = 604_800

router = APIRouter(tags=["servers"], dependencies=[KNOWN_PARAMETERS_ONLY])


@router.get(
    "/summary",
    summary="Work that waits and documents that failed",
    responses=error_responses(),
)
def summary(resources: Resources) -> SummaryView:
    """Return what waits, the expected time for it, and the failed documents by cause."""
    return summary_queries.summarise(resources.settings)


class ServerList(BaseModel):
    """The OCR servers that maintenance sampled recently."""

    servers: list[ServerView] = Field(description="Each server with its newest sample.")


@router.get("/servers", summary="Load of the OCR servers", responses=error_responses())
def servers(
    resources: Resources,
    seconds: Annotated[
        float,
        Query(
            ge=0,
            le=_LONGEST_SECONDS,
            allow_inf_nan=False,
            description="Also return the samples of this number of seconds.",
        ),
    ] = 0,
) -> ServerList:
    """Return the newest sample of each server with its diagnosis and the remedy.

    Diagnoses: `starved`, `front_end_bound`, `kv_bound`, `saturated`, `overloaded`,
    `serialising`, `idle`, `unknown`.
    """
    newest = server_samples.latest(
        resources.settings.occupancy.fresh, resources.settings.page_server
    )
    return ServerList(servers=[_view(diagnosed, seconds) for diagnosed in newest])


def _view(newest: DiagnosedSample, seconds: float) -> ServerView:
    url = newest.sample.url
    alarm = server_samples.starvation(url)
    before = server_samples.samples(url, seconds) if seconds else []
    return ServerView(
        url=url,
        starved_since=alarm.since if alarm else None,
        latest=_sample(newest),
        samples=[_sample(diagnosed) for diagnosed in before],
        limit_changes=[_change(change) for change in limit_changes.last_changes(url)],
    )


def _change(change: LimitChange) -> LimitChangeView:
    fields = asdict(change)
    del fields["url"]
    return LimitChangeView(**fields)


def _sample(diagnosed: DiagnosedSample) -> SampleView:
    sample = diagnosed.sample
    return SampleView(**asdict(sample), in_flight_limit=sample.limit, **asdict(diagnosed.diagnosis))
