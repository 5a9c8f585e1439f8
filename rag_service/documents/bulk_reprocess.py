"""Reprocessing of many documents as a job: small transactions, a full backlog is waited for.

A batch and its counts are one transaction, so a killed process loses and repeats nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from rag_service.config.options import Settings
from rag_service.database.engine import Connection, begin
from rag_service.documents.reprocess import Change, candidates, reprocess_one
from rag_service.jobs import runs
from rag_service.knowledgebase import reprocess_jobs
from rag_service.knowledgebase.reprocess_jobs import LockedJob
from rag_service.knowledgebase.selection import Selectors, select_documents
from rag_service.knowledgebase.views import Action
from rag_service.states import Priority

# Documents that a request handles itself, and documents of a transaction of a job.
AT_ONCE = 100
# A job fills the backlog to this part, so that uploads of its priority are still accepted.
_FILLED = 0.9
_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Request:
    selectors: Selectors
    change: Change


_REQUEST = TypeAdapter(_Request)


def start_if_large(settings: Settings, selectors: Selectors, change: Change) -> str | None:
    """Add a job if the selection is too large to be handled at once. Return its id.

    It is too large if it has more than AT_ONCE documents, or more than the backlog has space for.
    Raises what `reprocess` raises.
    """
    number = len(candidates(selectors, change, most=AT_ONCE + 1))
    with begin() as connection:
        space = _space(connection, settings, change.priority)
    if number <= min(AT_ONCE, space):
        return None
    request = _REQUEST.dump_python(_Request(selectors, change), mode="json")
    return reprocess_jobs.add_job(selectors, request, change.priority)


def advance(settings: Settings, stop: threading.Event) -> int:
    """Handle documents of the running jobs, a batch of each in turn, for some seconds.

    Return the number of documents.
    """
    until = time.monotonic() + _SECONDS
    total = handled = _advance_each(settings)
    while handled and not stop.is_set() and time.monotonic() < until:
        handled = _advance_each(settings)
        total += handled
    return total


def _advance_each(settings: Settings) -> int:
    return sum(_advance_one(settings, job_id) for job_id in reprocess_jobs.running())


def _advance_one(settings: Settings, job_id: str) -> int:
    with begin() as connection:
        job = reprocess_jobs.lock(connection, job_id)
        if job is None:
            return 0
        if reprocess_jobs.is_complete(connection, job):
            reprocess_jobs.finish(connection, job)
            return 0
        space = _space(connection, settings, job.priority)
        if space <= 0:
            reprocess_jobs.say(connection, job, _why_it_waits(settings, job))
            return 0
        ids = reprocess_jobs.take_documents(connection, job, min(space, AT_ONCE))
        reprocess_jobs.add_counts(connection, job, _redo(connection, settings, job, ids))
        return len(ids)


def _redo(
    connection: Connection, settings: Settings, job: LockedJob, ids: list[str]
) -> list[Action]:
    """Add runs for the documents that are still selected. Return the action for each document."""
    request = _parse(job.request)
    found = select_documents(connection, request.selectors, request.change.pages, among=ids)
    done = [
        reprocess_one(connection, settings, one, request.change, job_id=job.id).action
        for one in found
    ]
    # Deleted meanwhile, or in another state than when the job was added.
    return done + [Action.NOTHING_TO_REDO] * (len(ids) - len(found))


def _parse(request: Mapping[str, Any]) -> _Request:
    return _REQUEST.validate_python(dict(request))


def _target(settings: Settings) -> int:
    return max(1, int(settings.limits.max_backlog * _FILLED))


def _space(connection: Connection, settings: Settings, priority: Priority) -> int:
    """Return how many runs a job may add to the backlog of the priority."""
    target = _target(settings)
    return target - runs.backlog(connection, target, priority)


def _why_it_waits(settings: Settings, job: LockedJob) -> str:
    return (
        f"Waits until fewer than {_target(settings)} {job.priority.name.lower()} documents wait "
        "(90 % of limits.max_backlog)."
    )
