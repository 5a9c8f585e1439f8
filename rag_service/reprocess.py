"""Redoes documents: chooses them, says what would be done, makes the runs. Used by the API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rag_service import broker
from rag_service.errors import AlreadyActive, InvalidOptions, NotFound, require_outcome_code
from rag_service.knowledgebase import runs
from rag_service.knowledgebase.engine import Connection, begin
from rag_service.knowledgebase.runs import RunOptions
from rag_service.knowledgebase.selection import (
    Candidate,
    Selectors,
    good_pages,
    select_documents,
    unknown_ids,
)
from rag_service.knowledgebase.views import Action, Redo
from rag_service.parsers.registry import require_parser
from rag_service.settings import Settings
from rag_service.states import OcrMode, Priority, RunState, Stage


@dataclass(frozen=True, slots=True)
class Change:
    """What the new runs do differently; None keeps the document's own choice."""

    parser: str | None = None
    ocr: str | None = None
    all_pages: bool = False
    priority: Priority = Priority.BULK


def check_change(
    *, parser: str | None, ocr: str | None, all_pages: bool, priority: Priority = Priority.BULK
) -> Change:
    """Raises InvalidOptions."""
    if parser is not None:
        require_parser(parser)
    if ocr is not None and ocr not in set(OcrMode):
        raise InvalidOptions(f"ocr: {ocr!r} is none of auto, force, off.")
    return Change(parser, ocr, all_pages, priority)


def reprocess(
    settings: Settings,
    selectors: Selectors,
    change: Change,
    *,
    dry_run: bool = False,
    on_each: Callable[[Redo], None] = lambda _: None,
) -> list[Redo]:
    """Make a run for each selected document that has something to redo.

    Raises InvalidOptions where nothing is selected at all or the error code is none, NotFound
    for unknown ids, naming each.
    """
    if selectors.empty:
        raise InvalidOptions("Say which documents: by ids, failed, error or collection.")
    if selectors.error:
        require_outcome_code(selectors.error)
    with begin() as connection:
        unknown = unknown_ids(connection, selectors.ids)
        candidates = select_documents(connection, selectors)
    if unknown:
        raise NotFound(f"There is no document {', '.join(unknown)}.")
    redone = []
    for candidate in candidates:
        redo = _redo(settings, candidate, change, dry_run=dry_run)
        on_each(redo)
        redone.append(redo)
    return redone


def _redo(settings: Settings, candidate: Candidate, change: Change, *, dry_run: bool) -> Redo:
    options = _options(settings, candidate, change)
    with begin() as connection:
        reused = (
            0 if change.all_pages else good_pages(connection, candidate.id, options.fingerprint)
        )
    redo = Redo(
        id=candidate.id,
        filename=candidate.filename,
        action=_action(candidate, reused),
        run_id=None,
        pages_reused=reused,
        pages_redone=candidate.pages - reused if candidate.pages else None,
    )
    if dry_run or redo.action is not Action.WOULD_QUEUE:
        return redo
    return _queue(redo, options, change)


def _options(settings: Settings, candidate: Candidate, change: Change) -> RunOptions:
    return RunOptions(
        parser=change.parser or candidate.parser,
        model=settings.ocr.model,
        ocr=change.ocr or candidate.ocr,
        dpi=settings.ocr.dpi,
    )


def _action(candidate: Candidate, reused: int) -> Action:
    if candidate.active:
        return Action.SKIPPED_ACTIVE
    whole = candidate.state is RunState.PROCESSED and 0 < candidate.pages <= reused
    return Action.NOTHING_TO_REDO if whole else Action.WOULD_QUEUE


def _queue(redo: Redo, options: RunOptions, change: Change) -> Redo:
    try:
        with begin() as connection:
            run_id = _add_run(connection, redo.id, options, change)
    except NotFound:
        # Deleted since it was selected.
        return redo.model_copy(update={"action": Action.NOTHING_TO_REDO})
    except AlreadyActive:
        return redo.model_copy(update={"action": Action.SKIPPED_ACTIVE})
    broker.ring(Stage.PREPARE, run_id, redo.filename)
    return redo.model_copy(update={"action": Action.QUEUED, "run_id": run_id})


def _add_run(connection: Connection, document_id: str, options: RunOptions, change: Change) -> str:
    return runs.add_run(
        connection, document_id, options, change.priority, reuse_pages=not change.all_pages
    )
