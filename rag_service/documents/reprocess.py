"""Reprocessing of documents: select them, report what is done, add the runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rag_service.config.options import Settings
from rag_service.database.engine import Connection, begin
from rag_service.errors import AlreadyActive, InvalidOptions, NotFound, require_outcome_code
from rag_service.jobs import runs, wake_ups
from rag_service.jobs.runs import RunOptions
from rag_service.knowledgebase.selection import (
    Candidate,
    PageRange,
    Selectors,
    count_selected,
    reused_pages,
    select_documents,
    unknown_ids,
)
from rag_service.knowledgebase.views import Action, Redo
from rag_service.parsers.registry import require_parser
from rag_service.states import OcrMode, Priority, RunState, Stage

_RANGE = re.compile(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?")


@dataclass(frozen=True, slots=True)
class Change:
    """Options of the new runs; None keeps the document's option.

    `pages`: if given, only these are read again, else all pages that need it.
    """

    parser: str | None = None
    ocr: str | None = None
    all_pages: bool = False
    priority: Priority = Priority.BULK
    pages: tuple[PageRange, ...] = ()


def check_change(
    *,
    parser: str | None = None,
    ocr: str | None = None,
    all_pages: bool = False,
    priority: Priority = Priority.BULK,
    pages: str | None = None,
) -> Change:
    """Return the checked change. Raises InvalidOptions."""
    if parser is not None:
        require_parser(parser)
    if ocr is not None and ocr not in set(OcrMode):
        raise InvalidOptions(f"ocr: {ocr!r} is not one of auto, force, off.")
    if pages and all_pages:
        raise InvalidOptions("pages and all_pages cannot be given together.")
    return Change(parser, ocr, all_pages, priority, _page_ranges(pages) if pages else ())


def _page_ranges(text: str) -> tuple[PageRange, ...]:
    """Parse `3,7-9` into pairs of the first and the last page. Raises InvalidOptions."""
    ranges = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last:
            raise InvalidOptions(f"pages: {part.strip()!r} is not a page or a range, as in 3,7-9.")
        ranges.append((first, last))
    return tuple(ranges)


def reprocess(
    settings: Settings,
    selectors: Selectors,
    change: Change,
    *,
    dry_run: bool = False,
    most: int | None = None,
) -> list[Redo]:
    """Add a run for each selected document, of the oldest `most`, that has something to redo.

    If pages are selected, by number or by a property, they are read again although they are good,
    and the document's other good pages are reused.
    Raises InvalidOptions for empty or contradictory selectors, NotFound with all unknown ids.
    """
    redone = []
    for candidate in candidates(selectors, change, most=most):
        with begin() as connection:
            redo = reprocess_one(connection, settings, candidate, change, dry_run=dry_run)
        if redo.run_id is not None:
            wake_ups.notify(Stage.PREPARE, redo.run_id, redo.filename)
        redone.append(redo)
    return redone


def candidates(selectors: Selectors, change: Change, *, most: int | None = None) -> list[Candidate]:
    """Return the selected documents, oldest first, at most `most`.

    Raises InvalidOptions for empty or contradictory selectors, NotFound with all unknown ids.
    """
    _check_selectors(selectors)
    with begin() as connection:
        unknown = unknown_ids(connection, selectors.ids)
        found = select_documents(connection, selectors, change.pages, most=most)
    if unknown:
        raise NotFound(f"No document {', '.join(unknown)}.")
    return found


def selected_documents(selectors: Selectors) -> int:
    """Return the number of selected documents."""
    with begin() as connection:
        return count_selected(connection, selectors)


def _check_selectors(selectors: Selectors) -> None:
    if selectors.empty:
        raise InvalidOptions(
            "No documents selected: give ids, or failed, error, collection, truncated, since or "
            "another selector."
        )
    if selectors.error:
        require_outcome_code(selectors.error)
    if selectors.since and selectors.before and selectors.since >= selectors.before:
        raise InvalidOptions("since: must be earlier than `before`.")


def reprocess_one(
    connection: Connection,
    settings: Settings,
    candidate: Candidate,
    change: Change,
    *,
    dry_run: bool = False,
    job_id: str | None = None,
) -> Redo:
    """Add a run for the document if it has something to redo; no worker is notified of it.

    `job_id`: the reprocess job that adds it.
    """
    options = _options(settings, candidate, change)
    chosen = None if change.all_pages else candidate.chosen
    reused = 0 if change.all_pages else _count_reused(connection, candidate, options)
    redo = Redo(
        id=candidate.id,
        filename=candidate.filename,
        action=_choose_action(candidate, change.pages, chosen, reused),
        run_id=None,
        pages_reused=reused,
        pages_redone=candidate.pages - reused if candidate.pages else None,
    )
    if dry_run or redo.action is not Action.WOULD_QUEUE:
        return redo
    return _add_run(connection, redo, options, change, chosen or (), job_id)


def _options(settings: Settings, candidate: Candidate, change: Change) -> RunOptions:
    return RunOptions(
        parser=change.parser or candidate.parser,
        model=settings.ocr.model,
        ocr=change.ocr or candidate.ocr,
        dpi=settings.ocr.dpi,
        layout=settings.ocr.layout,
    )


def _count_reused(connection: Connection, candidate: Candidate, options: RunOptions) -> int:
    if candidate.chosen == ():
        return candidate.pages
    return reused_pages(connection, candidate.id, options.fingerprint, candidate.chosen or ())


def _choose_action(
    candidate: Candidate, numbers: Sequence[PageRange], chosen: tuple[int, ...] | None, reused: int
) -> Action:
    if candidate.active:
        return Action.SKIPPED_ACTIVE
    if candidate.pages and numbers and all(first > candidate.pages for first, _ in numbers):
        return Action.NO_SUCH_PAGE
    is_complete = candidate.state is RunState.PROCESSED and 0 < candidate.pages <= reused
    return Action.NOTHING_TO_REDO if is_complete or chosen == () else Action.WOULD_QUEUE


def _add_run(
    connection: Connection,
    redo: Redo,
    options: RunOptions,
    change: Change,
    redo_pages: tuple[int, ...],
    job_id: str | None,
) -> Redo:
    try:
        with connection.begin_nested():
            run_id = runs.add_run(
                connection, redo.id, options, change.priority,
                reuse_pages=not change.all_pages, redo_pages=redo_pages, reprocess_job_id=job_id,
            )  # fmt: skip
    except NotFound:
        # The document was deleted after its selection.
        return redo.model_copy(update={"action": Action.NOTHING_TO_REDO})
    except AlreadyActive:
        return redo.model_copy(update={"action": Action.SKIPPED_ACTIVE})
    return redo.model_copy(update={"action": Action.QUEUED, "run_id": run_id})
