"""The limit of one process: the number held to be right, and the trial that differs from it."""

from __future__ import annotations

import math

from rag_service.ocr.concurrency.changes import ChangeLog, ChangeReason
from rag_service.ocr.concurrency.tuning import SearchTuning


class CurrentLimit:
    """Requests to keep open. Every change is logged and counted with its reason.

    `base` is what the search holds to be right for the whole server; `usual` is this service's
    share of it. `trial` is what is tried now, equal to `base` outside trials.
    """

    def __init__(self, start: float, share: float, tuning: SearchTuning, server: str) -> None:
        self.base = self.trial = start
        self.changes = ChangeLog(server)
        self._share = share
        self._tuning = tuning
        self._bound = math.inf
        self._is_trial = False
        self.changes.add(0.0, self.usual, ChangeReason.STARTED)

    @property
    def is_at_bound(self) -> bool:
        """Whether ocr.max_in_flight allows no more."""
        return self.base >= self._bound / self._share

    @property
    def usual(self) -> float:
        """The limit without the trial that may be under way."""
        return min(self._bound, max(self._tuning.least, self.base * self._share))

    @property
    def now(self) -> float:
        """The limit now, as a mean over time: 1.5 is one and two requests in turn."""
        return self.trial if self.trial != self.base else self.usual

    def move_to(self, base: float, reason: ChangeReason) -> None:
        """Make `base` the number that is right, and end a trial."""
        old = self.now
        self.base = self._within_bound(min(self._tuning.most, max(self._tuning.least, base)))
        self.trial, self._is_trial = self.base, False
        self.changes.add(old, self.now, reason)

    def keep(self, base: float, reason: ChangeReason) -> None:
        """Make `base` the number that is right; the trial ends with `end_trial`."""
        old, self.base = self.usual, self._within_bound(base)
        if self.usual != old:
            self._is_trial = False
            self.changes.add(old, self.usual, reason)

    def end_trial(self) -> None:
        """Go back to the usual limit."""
        tried, self.trial = self.trial, self.base
        if self._is_trial:
            self.changes.add(tried, self.now, ChangeReason.TRIAL_ENDED)
        self._is_trial = False

    def try_less(self, factor: float) -> None:
        """Try a smaller limit in this window."""
        self._try(max(self._tuning.least, self.base * factor), ChangeReason.TRIED_LESS)

    def try_more(self, factor: float) -> None:
        """Try a larger limit in this window."""
        larger = min(self._tuning.most, self.base * factor)
        self._try(min(larger, self._bound), ChangeReason.TRIED_MORE)

    def set_bound(self, bound: float) -> bool:
        """Never let the limit be above `bound` from now on; return whether that moved it."""
        old = self.now
        is_above = old > bound or self.base > bound / self._share
        self._bound = bound
        if is_above:
            self.base = self.trial = self._within_bound(self.base)
            self._is_trial = False
            self.changes.add(old, self.now, ChangeReason.BOUND)
        return is_above

    def _try(self, limit: float, reason: ChangeReason) -> None:
        old, self.trial = self.now, limit
        if self.trial != self.base:
            self._is_trial = True
            self.changes.add(old, self.now, reason)

    def _within_bound(self, base: float) -> float:
        return min(base, self._bound / self._share)
