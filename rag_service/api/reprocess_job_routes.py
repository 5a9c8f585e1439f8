"""The routes of reprocess jobs: list, show, cancel."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from pydantic import BaseModel, Field

from rag_service.api.problems import error_responses
from rag_service.api.query_parameters import KNOWN_PARAMETERS_ONLY
from rag_service.errors import NotFound
from rag_service.knowledgebase import reprocess_jobs
from rag_service.knowledgebase.views import ReprocessJobView

router = APIRouter(tags=["reprocess"], dependencies=[KNOWN_PARAMETERS_ONLY])

_LISTED = 20
_MOST_LISTED = 100
_ID_LETTERS = 64


async def _path_id(
    job_id: Annotated[
        str, Path(description="The job's id.", examples=["7c3e9a1d5b2f4e60917c8d7e6f5a4b3c"])
    ],
) -> str:
    # PostgreSQL refuses NUL in text.
    if not job_id.isalnum():
        raise NotFound(f"No reprocess job {job_id[:_ID_LETTERS]}.")
    return job_id[:_ID_LETTERS]


_JobId = Annotated[str, Depends(_path_id)]


class ReprocessJobList(BaseModel):
    """The newest reprocess jobs."""

    jobs: list[ReprocessJobView] = Field(description="The jobs, newest first.")


class ReprocessCancelView(BaseModel):
    """Whether there was a job to cancel."""

    id: str = Field(description="The job's id.")
    cancelled: bool = Field(description="False if the job had ended.")


@router.get("/reprocess-jobs", summary="List reprocess jobs", responses=error_responses())
def jobs(
    limit: Annotated[
        int, Query(ge=1, le=_MOST_LISTED, description="Jobs in the answer.")
    ] = _LISTED,
) -> ReprocessJobList:
    """Return the newest reprocess jobs. A job is removed 30 days after its end."""
    return ReprocessJobList(jobs=reprocess_jobs.list_jobs(limit))


@router.get(
    "/reprocess-jobs/{job_id}", summary="Show a reprocess job", responses=error_responses(NotFound)
)
def job(job_id: _JobId) -> ReprocessJobView:
    """Return the job with its progress."""
    return reprocess_jobs.get_job(job_id)


@router.post(
    "/reprocess-jobs/{job_id}/cancel",
    summary="Cancel a reprocess job",
    responses=error_responses(NotFound),
)
def cancel_job(job_id: _JobId) -> ReprocessCancelView:
    """Add no more runs. The runs that the job has added go on."""
    return ReprocessCancelView(id=job_id, cancelled=reprocess_jobs.cancel_job(job_id))
