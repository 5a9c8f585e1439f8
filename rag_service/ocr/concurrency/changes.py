"""Changes of the number in flight and their reasons, counted until someone takes the counts."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import StrEnum

log = logging.getLogger(__name__)


class ChangeReason(StrEnum):
    """Why the search changed the number of requests it keeps in flight.

    docs/concurrency.md explains each.
    """

    STARTED = "started"
    FEW_PROCESSES = "few_processes"
    DOUBLED = "doubled"
    DOUBLED_EARLY = "doubled_early"
    DOUBLING_ENDED = "doubling_ended"
    DOUBLING_STOPPED = "doubling_stopped"
    DOUBLING_RESUMED = "doubling_resumed"
    TRIED_MORE = "tried_more"
    TRIED_LESS = "tried_less"
    TRIAL_ENDED = "trial_ended"
    MORE_GAINED = "more_gained"
    LESS_COST_NOTHING = "less_cost_nothing"
    BELOW_BEST = "below_best"
    SERVER_IDLE = "server_idle"
    QUEUE_TOO_LONG = "queue_too_long"
    ANSWER_LATE = "answer_late"
    TIMED_OUT = "timed_out"
    PROCESSES_CHANGED = "processes_changed"
    EVENED_OUT = "evened_out"
    BOUND = "bound"

    @property
    def is_trial(self) -> bool:
        """Whether the change is undone at the end of its window."""
        return self in _TRIALS


_TRIALS = frozenset({ChangeReason.TRIED_MORE, ChangeReason.TRIED_LESS, ChangeReason.TRIAL_ENDED})


@dataclass(frozen=True, slots=True)
class ChangeCount:
    """How often a reason changed the limit; `old` and `new` are of the last change."""

    count: int
    old: float
    new: float


class ChangeLog:
    """Writes each change to the log and counts it by reason."""

    def __init__(self, server: str = "") -> None:
        """`server` names the server in the log lines."""
        self._server = server
        self._counts: dict[ChangeReason, ChangeCount] = {}

    def add(self, old: float, new: float, reason: ChangeReason) -> None:
        """Log the change, at DEBUG if it is a trial, and count it."""
        level = logging.DEBUG if reason.is_trial else logging.INFO
        log.log(level, "Requests in flight%s: %.1f -> %.1f, %s", self._at(), old, new, reason)
        # The newest change stands last, as take() promises.
        before = self._counts.pop(reason, None)
        self._counts[reason] = ChangeCount(1 + (before.count if before else 0), old, new)

    def take(self) -> dict[ChangeReason, ChangeCount]:
        """Return the counts since the last call, the newest change last, and start at zero."""
        taken, self._counts = self._counts, {}
        return taken

    def _at(self) -> str:
        return f" at {self._server}" if self._server else ""
