"""Fit a job's answer into RunPod's size limit for outputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rag_service.errors import PayloadTooLarge
from rag_service.runpod.job_format import JobOutput, PageOutput, PageProblem


def fitted(output: JobOutput, max_bytes: int) -> dict[str, Any]:
    """Return the answer as JSON; pages from the first that does not fit go to `remaining_pages`.

    A page that is too large for any answer gets an error; otherwise it would be posted for ever.
    """
    space = max_bytes - size(output.model_copy(update={"pages": []}))
    pages = [page if size(page) <= space else _too_large(page) for page in output.pages]
    kept = _count_fitting(pages, space)
    remaining = [*output.remaining_pages, *(page.page for page in pages[kept:])]
    return output.model_copy(
        update={"pages": pages[:kept], "remaining_pages": remaining}
    ).model_dump(mode="json")


def size(part: JobOutput | PageOutput) -> int:
    """Return the bytes of a part as the worker loop writes it, with the comma after it."""
    return len(json.dumps(part.model_dump(mode="json"), ensure_ascii=False).encode()) + 2


def _count_fitting(pages: Sequence[PageOutput], space: int) -> int:
    for count, page in enumerate(pages):
        # A page that is left out needs space for its number, which is smaller than the page.
        space -= size(page)
        if space < 0:
            return count
    return len(pages)


def _too_large(page: PageOutput) -> PageOutput:
    message = f"The text of page {page.page} is too large for a job's answer."
    return PageOutput(page=page.page, error=PageProblem(code=PayloadTooLarge.code, message=message))
