"""RunPod's webhook: it triggers a poll of the job; its content is never trusted."""

from __future__ import annotations

from typing import Annotated

import anyio
from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, Field, ValidationError

from rag_service.api.problems import error_responses
from rag_service.api.resources import Resources
from rag_service.api.upload import read_body
from rag_service.errors import InvalidOptions, NotFound, TooLarge
from rag_service.jobs import remote_jobs
from rag_service.runpod.job_keys import token_digest

router = APIRouter(prefix="/webhooks", tags=["webhooks"])

# The body contains the whole result, which is read and discarded. RunPod accepts results of 10 MB;
# with escapes they are longer.
_MAX_BYTES = 16 * 1024 * 1024


class JobNotice(BaseModel):
    """The part of the webhook's body that is used: the id of the job."""

    id: str = Field(min_length=1, max_length=200, description="RunPod's id of the job.")


class WebhookReceipt(BaseModel):
    """The notice was accepted."""

    heard: bool = Field(description="Always true.")


@router.post(
    "/runpod/{token}",
    summary="Receive RunPod's notice that a job has ended",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": JobNotice.model_json_schema()}},
        }
    },
    responses=error_responses(NotFound, InvalidOptions, TooLarge),
)
async def runpod(
    token: Annotated[str, Path(description="The token of the post, which is its key.")],
    request: Request,
    resources: Resources,
) -> WebhookReceipt:
    """Poll the job at once. If the answer of its post was lost, the id of the body is adopted
    after RunPod has confirmed it. Nothing else of the body is used.
    """
    digest = token_digest(token)
    # Before a byte of the body is read: without a token no client can fill the memory.
    if not await anyio.to_thread.run_sync(remote_jobs.has_token, digest):
        raise NotFound("No job has this token.")
    async with resources.webhook_bodies:
        note = _notice(await read_body(request, _MAX_BYTES))
    if not await anyio.to_thread.run_sync(remote_jobs.hint, digest, note.id):
        raise NotFound("No job has this token.")
    return WebhookReceipt(heard=True)


def _notice(body: bytes) -> JobNotice:
    try:
        return JobNotice.model_validate_json(body)
    except ValidationError as error:
        raise InvalidOptions("The body has no job id.") from error
