"""Pages that could not be drawn in time: they are not tried again at once, nor are many others
of their document.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

_FORGET_AFTER_SECONDS = 300.0
# Pages in a row that were too slow, after which no page of the document is tried for a while.
_GIVE_UP_AFTER = 3
_MOST_DOCUMENTS = 1000


@dataclass
class _Record:
    """The slow pages of one document, and how many in a row there were."""

    until: float
    pages: set[int] = field(default_factory=set)
    in_a_row: int = 0


class SlowPages:
    """Slow pages by the key of their document, for the last minutes."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def note(self, key: str, number: int) -> None:
        """Record that this page was too slow."""
        until = time.monotonic() + _FORGET_AFTER_SECONDS
        record = self._current(key) or _Record(until)
        record.until = until
        record.pages.add(number)
        record.in_a_row += 1
        self._records[key] = record
        self._records.move_to_end(key)
        if len(self._records) > _MOST_DOCUMENTS:
            self._records.popitem(last=False)

    def note_drawn(self, key: str) -> None:
        """Record that a page of the document was drawn in time."""
        if (record := self._current(key)) is not None:
            record.in_a_row = 0

    def is_slow(self, key: str | None) -> bool:
        """Return whether the last page of this document that was tried was too slow."""
        record = self._current(key) if key is not None else None
        return record is not None and record.in_a_row > 0

    def refusal(self, key: str, number: int) -> str | None:
        """Return why the page should not be tried now, or None."""
        record = self._current(key)
        if record is None:
            return None
        wait = f"it is tried again in {record.until - time.monotonic():.0f} s"
        if number in record.pages:
            return f"Page {number} took too long to draw a moment ago; {wait}."
        if record.in_a_row >= _GIVE_UP_AFTER:
            return f"{record.in_a_row} pages of this document in a row took too long; {wait}."
        return None

    def _current(self, key: str) -> _Record | None:
        record = self._records.get(key)
        if record is not None and record.until <= time.monotonic():
            del self._records[key]
            return None
        return record
