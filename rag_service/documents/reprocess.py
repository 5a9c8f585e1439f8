"""Redoes documents: chooses them, says what would be done, makes the runs. Used by the API."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rag_service.config.options import Settings
from rag_service.database.engine import begin
from rag_service.errors import AlreadyActive, InvalidOptions, NotFound, require_outcome_code
from rag_service.jobs import runs, wake_ups
from rag_service.jobs.runs import RunOptions
from rag_service.knowledgebase.selection import (
    Candidate,
    PageRange,
    Selectors,
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
    """What the new runs do differently; None keeps the document's own choice.

    `pages`: those alone are read again; none given means all that have to be.
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
    """Raises InvalidOptions."""
    if parser is not None:
        require_parser(parser)
    if ocr is not None and ocr not in set(OcrMode):
        raise InvalidOptions(f"ocr: {ocr!r} is none of auto, force, off.")
    if pages and all_pages:
        raise InvalidOptions("pages and all_pages contradict each other.")
    return Change(parser, ocr, all_pages, priority, _page_ranges(pages) if pages else ())


def _page_ranges(text: str) -> tuple[PageRange, ...]:
    """`3,7-9` as pairs of the first and the last page."""
    ranges = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last:
            raise InvalidOptions(f"pages: {part.strip()!r} is no page and no range, as in 3,7-9.")
        ranges.append((first, last))
    return tuple(ranges)


def reprocess(
    settings: Settings,
    selectors: Selectors,
    change: Change,
    *,
    dry_run: bool = False,
    on_each: Callable[[Redo], None] = lambda _: None,
) -> list[Redo]:
    """Make a run for each selected document that has something to redo.

    Where pages are chosen, by number or by what they carry, they are read again though they are
    good, and the document's other good pages stay as they are. Raises InvalidOptions where the
    selectors mean nothing, NotFound for unknown ids, naming each.
    """
    _check_selectors(selectors)
    with begin() as connection:
        unknown = unknown_ids(connection, selectors.ids)
        candidates = select_documents(connection, selectors, change.pages)
    if unknown:
        raise NotFound(f"There is no document {', '.join(unknown)}.")
    redone = []
    for candidate in candidates:
        redo = _redo(settings, candidate, change, dry_run=dry_run)
        on_each(redo)
        redone.append(redo)
    return redone


def _check_selectors(selectors: Selectors) -> None:
    if selectors.empty:
        raise InvalidOptions(
            "Say which documents: by ids, or by failed, error, collection, truncated, since or "
            "another selector."
        )
    if selectors.error:
        require_outcome_code(selectors.error)
    if selectors.since and selectors.before and selectors.since >= selectors.before:
        raise InvalidOptions("since: nothing can be at or after it and yet before `before`.")


def _redo(settings: Settings, candidate: Candidate, change: Change, *, dry_run: bool) -> Redo:
    options = _options(settings, candidate, change)
    chosen = None if change.all_pages else candidate.chosen
    reused = 0 if change.all_pages else _reused(candidate, options)
    redo = Redo(
        id=candidate.id,
        filename=candidate.filename,
        action=_action(candidate, change.pages, chosen, reused),
        run_id=None,
        pages_reused=reused,
        pages_redone=candidate.pages - reused if candidate.pages else None,
    )
    if dry_run or redo.action is not Action.WOULD_QUEUE:
        return redo
    return _queue(redo, options, change, chosen or ())


def _options(settings: Settings, candidate: Candidate, change: Change) -> RunOptions:
    return RunOptions(
        parser=change.parser or candidate.parser,
        model=settings.ocr.model,
        ocr=change.ocr or candidate.ocr,
        dpi=settings.ocr.dpi,
        layout=settings.ocr.layout,
    )


def _reused(candidate: Candidate, options: RunOptions) -> int:
    if candidate.chosen == ():
        return candidate.pages
    with begin() as connection:
        return reused_pages(connection, candidate.id, options.fingerprint, candidate.chosen or ())


def _action(
    candidate: Candidate, numbers: Sequence[PageRange], chosen: tuple[int, ...] | None, reused: int
) -> Action:
    if candidate.active:
        return Action.SKIPPED_ACTIVE
    if candidate.pages and numbers and all(first > candidate.pages for first, _ in numbers):
        return Action.NO_SUCH_PAGE
    whole = candidate.state is RunState.PROCESSED and 0 < candidate.pages <= reused
    return Action.NOTHING_TO_REDO if whole or chosen == () else Action.WOULD_QUEUE


def _queue(redo: Redo, options: RunOptions, change: Change, redo_pages: tuple[int, ...]) -> Redo:
    try:
        with begin() as connection:
            run_id = runs.add_run(
                connection, redo.id, options, change.priority,
                reuse_pages=not change.all_pages, redo_pages=redo_pages,
            )  # fmt: skip
    except NotFound:
        # Deleted since it was selected.
        return redo.model_copy(update={"action": Action.NOTHING_TO_REDO})
    except AlreadyActive:
        return redo.model_copy(update={"action": Action.SKIPPED_ACTIVE})
    wake_ups.notify(Stage.PREPARE, run_id, redo.filename)
    return redo.model_copy(update={"action": Action.QUEUED, "run_id": run_id})
