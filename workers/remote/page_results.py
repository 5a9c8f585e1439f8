"""The end of a job as results of its pages: what is stored, what is posted again and why. Pure."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from rag_service import errors
from rag_service.errors import LayoutUnavailable, OcrFailed, PageError
from rag_service.jobs.remote_jobs import JobRow
from rag_service.jobs.run_pages import StoredPage
from rag_service.runpod.decisions import JobEnded
from rag_service.runpod.job_format import JobOutput, PageOutput, PageProblem
from rag_service.states import PageState, PostReason

log = logging.getLogger(__name__)

# Error codes of the handler for which a second try would change nothing.
_FINAL_ERRORS = {
    error.code: error
    for error in (
        errors.PageTooLarge,
        errors.PageTimeout,
        errors.PageUnrenderable,
        errors.OcrFailed,
        errors.OcrRejected,
        errors.OcrEmpty,
        errors.OcrRepetition,
    )
}
# The state of a page that has this warning.
_STATES = {"page_without_text": PageState.NO_TEXT, "page_truncated": PageState.TRUNCATED}


def page_results(
    job: JobRow, ended: JobEnded, posted_for: Mapping[int, Collection[PostReason]]
) -> tuple[list[StoredPage], dict[int, PostReason]]:
    """Return what is stored of the job's pages, and for which reason others are posted again.

    `posted_for`: the reasons of each page's posts until now. A page is posted once at most for
    the same failure. A job that the service cancelled leaves its pages as they are.
    """
    if ended.error is None:
        return [], {}
    found = _answers(ended.output)
    remaining = _remaining(job, ended.output)
    stored: list[StoredPage] = []
    reposts: dict[int, PostReason] = {}
    for number in job.pages:
        if number in remaining:
            reposts[number] = PostReason.REMAINING_PAGES
            continue
        page = found.get(number)
        if page is not None and page.error is None:
            stored.append(_read_page(page, ended.output))
            continue
        error, final = _page_error(page, ended.error)
        spent = final or ended.repost in posted_for.get(number, ())
        repost = None if spent else ended.repost
        if repost is not None:
            reposts[number] = repost
        stored.append(_failed_page(number, error, repost))
    return stored, reposts


def _answers(output: JobOutput | None) -> dict[int, PageOutput]:
    """Return the answer for each page; a page with two different answers has none."""
    found: dict[int, PageOutput] = {}
    twice: set[int] = set()
    for page in output.pages if output else []:
        if found.setdefault(page.page, page) != page:
            log.warning("A job of RunPod returned two different answers for page %d.", page.page)
            twice.add(page.page)
    return {number: page for number, page in found.items() if number not in twice}


def _remaining(job: JobRow, output: JobOutput | None) -> set[int]:
    """Pages that did not fit the answer; none if the answer has no page of the job at all."""
    if output is None:
        return set()
    returned = {page.page for page in output.pages}
    return set(output.remaining_pages) - returned if returned & set(job.pages) else set()


def _page_error(page: PageOutput | None, job_error: PageError) -> tuple[PageError, bool]:
    """Return the page's own error or the job's, and whether a second try cannot help."""
    if page is None or page.error is None:
        return job_error, False
    known = _FINAL_ERRORS.get(page.error.code)
    if known is not None:
        return known(page.error.message), True
    if page.error.code == LayoutUnavailable.code:
        return LayoutUnavailable(page.error.message), False
    return OcrFailed(f"{page.error.message} ({page.error.code})"), False


def _failed_page(number: int, error: PageError, repost: PostReason | None) -> StoredPage:
    return StoredPage(
        number=number,
        state=PageState.FAILED,
        markdown="",
        columns={},
        error=None if repost else error,
        retry_in=0.0 if repost else None,
    )


def _read_page(page: PageOutput, output: JobOutput | None) -> StoredPage:
    engine = output.engine if output else None
    warnings = page.warnings or _missing_warnings(page)
    states = [_STATES[warning.code] for warning in warnings if warning.code in _STATES]
    return StoredPage(
        number=page.page,
        state=states[0] if states else PageState.OCR,
        markdown=page.markdown.strip(),
        columns={
            "finish_reason": page.finish_reason,
            "prompt_tokens": page.tokens.prompt,
            "completion_tokens": page.tokens.completion,
            "seconds": page.seconds,
            "dpi": page.dpi,
            "engine": engine.name if engine else None,
            "model": engine.model if engine else None,
            "parser_version": page.parser_version,
        },
        regions=[region.model_dump() for region in page.regions],
        warnings=[warning.model_dump() for warning in warnings],
    )


def _missing_warnings(page: PageOutput) -> list[PageProblem]:
    """The warnings of a page without text or with cut text whose handler sent none."""
    if not page.markdown.strip():
        message = "Two readings found ink but no writing."
        return [PageProblem(code="page_without_text", message=message)]
    if page.finish_reason == "length":
        return [PageProblem(code="page_truncated", message="The text stops at the token limit.")]
    return []
