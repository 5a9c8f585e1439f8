"""How the end of a task appears in Flower and in Celery's log: as what became of its document.

A failed document is FAILURE, a run that was given back is RETRY, a message that found nothing to
do is IGNORED. Every event names its task: Flower may have missed the earlier ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from celery.exceptions import Ignore, Retry
from celery.worker.request import Request


class OutcomeKind(StrEnum):
    """What became of the work on a message, as a state of Celery."""

    DONE = "SUCCESS"
    FAILED = "FAILURE"
    GIVEN_BACK = "RETRY"
    NOTHING_DONE = "IGNORED"
    STILL_AT_WORK = "STARTED"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the work on a message, and the sentence that says so."""

    kind: OutcomeKind
    text: str


class DocumentFailed(Exception):
    """Marks the task of a failed document. It is expected: Celery logs no traceback."""


class GivenBack(Exception):
    """The reason for which a run was given back, as Flower shows it."""


class NothingDone(Ignore):  # type: ignore[misc]
    """The reason for which a message led to nothing."""


class NamedRequest(Request):  # type: ignore[misc]
    """A Celery request whose events have the name and the arguments of its task."""

    def send_event(self, type: str, **fields: Any) -> None:
        """Send an event of this task."""
        named = {"name": self.name, "args": self.argsrepr, "kwargs": self.kwargsrepr}
        super().send_event(type, **named | fields)

    def on_failure(self, exc_info: Any, *args: Any, **options: Any) -> None:
        """Celery sends no event about an ignored task: it would seem to run for ever."""
        super().on_failure(exc_info, *args, **options)
        if isinstance(exc_info.exception, NothingDone):
            self.send_event("task-ignored", result=str(exc_info.exception))


# Arguments of the decorator of both tasks.
TASK_OPTIONS: dict[str, Any] = {
    "bind": True,
    "Request": f"{__name__}:{NamedRequest.__name__}",
    "throws": (DocumentFailed,),
}


def end_task(outcome: Outcome) -> str:
    """Return the result of a task that succeeded, or raise what gives the task another state."""
    if outcome.kind is OutcomeKind.FAILED:
        raise DocumentFailed(outcome.text)
    if outcome.kind is OutcomeKind.GIVEN_BACK:
        raise Retry(outcome.text, GivenBack(outcome.text))
    if outcome.kind is OutcomeKind.NOTHING_DONE:
        raise NothingDone(outcome.text)
    if outcome.kind is OutcomeKind.STILL_AT_WORK:
        # No event: the first delivery's task ends with one.
        raise Ignore(outcome.text)
    return outcome.text
