"""RunPod's word that a job has ended: looked into at once, never believed. Part of the API."""

from __future__ import annotations

import anyio
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, ValidationError

from rag_service.api.upload import body_of
from rag_service.errors import InvalidOptions, NotFound
from rag_service.jobs import remote_jobs
from rag_service.runpod.job_keys import token_digest

router = APIRouter(prefix="/webhooks", tags=["webhooks"])

# RunPod sends the whole result along; it is read to its end and dropped.
_MOST_BYTES = 24 * 1024 * 1024


class Note(BaseModel):
    """What is taken from the webhook: which job it speaks of."""

    id: str = Field(min_length=1, max_length=200)


class Heard(BaseModel):
    heard: bool


@router.post("/runpod/{token}", summary="RunPod says that a job has ended")
async def runpod(token: str, request: Request) -> Heard:
    """Makes the job's next poll immediate; where the post's answer was lost, its id is adopted
    once RunPod itself confirms it. Nothing else of the body is used.
    """
    body = await body_of(request, _MOST_BYTES)
    try:
        note = Note.model_validate_json(body)
    except ValidationError as error:
        raise InvalidOptions("The body names no job.") from error
    digest = token_digest(token)
    if not await anyio.to_thread.run_sync(remote_jobs.hint, digest, note.id):
        raise NotFound("There is no job with this token.")
    return Heard(heard=True)
