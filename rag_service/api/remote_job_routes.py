"""The route of a document's jobs on RunPod."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, Field

from rag_service.api.document_routes import DocumentId, require_document
from rag_service.api.problems import error_responses
from rag_service.api.query_parameters import KNOWN_PARAMETERS_ONLY
from rag_service.api.resources import Resources
from rag_service.errors import NotFound
from rag_service.knowledgebase.job_queries import list_jobs
from rag_service.knowledgebase.views import JobView

router = APIRouter(tags=["documents"], dependencies=[KNOWN_PARAMETERS_ONLY])


class JobList(BaseModel):
    """All jobs that were posted for the document's pages, oldest first."""

    jobs: list[JobView] = Field(description="The jobs, oldest first.")


@router.get(
    "/documents/{document_id}/jobs", summary="Jobs on RunPod", responses=error_responses(NotFound)
)
def jobs(document_id: DocumentId, resources: Resources) -> JobList:
    """Return the jobs that were posted to RunPod for the document, in all of its runs: pages,
    reason of the post, state and result. Empty if the pages are not sent to RunPod.
    """
    require_document(document_id, resources)
    return JobList(jobs=list_jobs(document_id))
