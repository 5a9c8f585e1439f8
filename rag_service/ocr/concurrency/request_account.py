"""Accounting of open requests: how much a limit was used, and the turns of a fractional limit."""

from __future__ import annotations

import math

_ROUNDING = 1e-9


class RequestAccount:
    """Open requests of one process over time.

    A limit that is no whole number is kept as a mean: 1.5 is one and two in turn, 0.3 is one
    request with a pause after each.
    """

    def __init__(self) -> None:
        # Request-seconds that were open up to now.
        self.used = 0.0
        # When the first account after the last move of the limit was made.
        self.moved_at = math.inf
        self._open = 0
        self._owed = 0.0
        self._at: float | None = None

    def note(self, in_flight: int, now: float, limit: float, answer_seconds: float | None) -> None:
        """Account for the time since the last call, in which the earlier number was open."""
        passed = 0.0 if self._at is None else max(0.0, now - self._at)
        owed = self._owed + (limit - self._open) * passed
        # Time without pages to send must not be made up for by many requests at once.
        self._owed = min(answer_seconds or 0.0, owed)
        self.used += self._open * passed
        self.moved_at = min(self.moved_at, now)
        self._at, self._open = now, in_flight

    def note_move(self) -> None:
        """Start `moved_at` again: the limit was moved."""
        self.moved_at = math.inf if self._at is None else self._at

    def admit(self, in_flight: int, limit: float, *, fraction_is_due: bool) -> bool:
        """Whether one more request may be open; counts it as open if so."""
        whole = math.floor(limit + _ROUNDING)
        admitted = in_flight < whole or (in_flight == whole and fraction_is_due)
        self._open += admitted
        return admitted

    def owes_request(self, limit: float) -> bool:
        """Whether a limit above 1 with a fraction was used less than its mean so far."""
        return _ROUNDING < limit % 1 < 1 - _ROUNDING and self._owed >= 0
