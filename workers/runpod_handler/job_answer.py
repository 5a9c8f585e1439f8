"""A job's answer within RunPod's limit for outputs. Used by jobs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rag_service.errors import PayloadTooLarge
from rag_service.runpod.job_format import JobOutput, PageOutput, PageProblem


def fitted(output: JobOutput, max_bytes: int) -> dict[str, Any]:
    """The answer as JSON; pages from the first that does not fit on stand in `remaining_pages`.

    A page that no answer could carry says so by its error, or it would be asked for for ever.
    """
    room = max_bytes - size(output.model_copy(update={"pages": []}))
    pages = [page if size(page) <= room else _too_large(page) for page in output.pages]
    kept = _how_many(pages, room)
    remaining = [*output.remaining_pages, *(page.page for page in pages[kept:])]
    return output.model_copy(
        update={"pages": pages[:kept], "remaining_pages": remaining}
    ).model_dump(mode="json")


def size(part: JobOutput | PageOutput) -> int:
    """Bytes of a part as the worker loop writes it, with the comma after it."""
    return len(json.dumps(part.model_dump(mode="json"), ensure_ascii=False).encode()) + 2


def _how_many(pages: Sequence[PageOutput], room: int) -> int:
    for count, page in enumerate(pages):
        # A page that is left out still takes its number's place.
        room -= size(page)
        if room < 0:
            return count
    return len(pages)


def _too_large(page: PageOutput) -> PageOutput:
    message = f"The text of page {page.page} is too large for a job's answer."
    return PageOutput(page=page.page, error=PageProblem(code=PayloadTooLarge.code, message=message))
