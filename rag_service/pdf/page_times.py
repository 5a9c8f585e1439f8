"""The time that pages of one document may take: less after each page that ran into its limit.

A few slow pages among good ones cost their own time. A document in which page after page runs into
its limit is given up within two of these limits, however many pages it has. All pages together have
a limit too, so that slow pages between good ones cannot hold a document for hours.
"""

from __future__ import annotations

from dataclasses import dataclass

from rag_service.runtime.time_spent import TimeSpent

# Pages in a row that ran into their limit, after which no further page is tried.
_GIVE_UP_AFTER = 5
# The part of a page's time for its drawing and text together; the rest is for its text alone.
_FIRST_SHARE = 2 / 3


@dataclass
class _Attempts:
    """Attempts of one kind. Each that takes too long halves the time of the next one."""

    seconds: float
    late_in_a_row: int = 0

    @property
    def given_up(self) -> bool:
        return self.late_in_a_row >= _GIVE_UP_AFTER

    @property
    def limit(self) -> float:
        return self.seconds * 0.5 ** min(self.late_in_a_row, _GIVE_UP_AFTER)

    def note(self, *, late: bool) -> None:
        """Count an attempt that ended in time, or did not."""
        self.late_in_a_row = self.late_in_a_row + 1 if late else 0


class PageTimes:
    """Limits in seconds for planning a page with its pixels, by its text alone, and drawing it.

    Planning and drawing happen in different stages of a run, so they share what was `spent`.
    """

    def __init__(
        self, page_seconds: float, document_seconds: float, spent: TimeSpent | None = None
    ) -> None:
        """`page_seconds`: pdf.page_time_limit, for all attempts at a page together.

        `document_seconds`: for all pages together. `spent`: what they took before.
        """
        spent = spent or TimeSpent()
        self.with_pixels = _Attempts(page_seconds * _FIRST_SHARE, spent.late_pages)
        self.text_alone = _Attempts(page_seconds * (1 - _FIRST_SHARE), spent.late_texts)
        self.drawing = _Attempts(page_seconds, spent.late_pages)
        self.document_seconds = document_seconds
        self._seconds = spent.seconds

    def charge(self, seconds: float) -> None:
        """Count seconds of the render child for a page, or for opening the file."""
        self._seconds += seconds

    @property
    def used_up(self) -> bool:
        """The pages together have had their time."""
        return self._seconds >= self.document_seconds

    @property
    def spent(self) -> TimeSpent:
        late = max(self.with_pixels.late_in_a_row, self.drawing.late_in_a_row)
        return TimeSpent(self._seconds, late, self.text_alone.late_in_a_row)
