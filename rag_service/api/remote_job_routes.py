"""The route of a document's jobs on RunPod. Part of the API."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from rag_service.api.document_routes import DocumentId, require_document
from rag_service.api.problems import error_responses
from rag_service.api.query_parameters import KNOWN_PARAMETERS_ONLY
from rag_service.api.resources import Here
from rag_service.errors import NotFound
from rag_service.knowledgebase.job_queries import list_jobs
from rag_service.knowledgebase.views import JobView

router = APIRouter(tags=["documents"], dependencies=[KNOWN_PARAMETERS_ONLY])


class JobList(BaseModel):
    """Every post of the document's pages, oldest first."""

    jobs: list[JobView]


@router.get(
    "/documents/{document_id}/jobs", summary="Jobs on RunPod", responses=error_responses(NotFound)
)
def jobs(document_id: DocumentId, here: Here) -> JobList:
    """What was posted to RunPod for the document, in all of its runs: which pages, why, where
    each job is, what came of it. Empty where its pages travel another way.
    """
    require_document(document_id, here)
    return JobList(jobs=list_jobs(document_id))
