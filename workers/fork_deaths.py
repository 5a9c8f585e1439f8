"""Deaths of a worker's forks in a row: why, how many, and the pause that follows.

Forks report in memory that they share with the main process; the main process counts. Import it
before the forks are made.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass

from rag_service.jobs.leases import Blame

# As many deaths in a row, or on as many documents, point at the worker and not at a document.
SEVERAL = 3
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_REASON_BYTES = 400
# Written by forks: a number that changes when one ends a run well.
_WELL = struct.Struct("Q")
# Written by the main process: when forks may claim again (monotonic), whether the worker is sick.
_VERDICT = struct.Struct("d?")
_VERDICT_AT = 64
# Written by a fork before it ends: its blame and its reason.
_REPORT_AT = 128

# Anonymous shared memory: every fork sees what the main process writes, and the reverse.
_shared = mmap.mmap(-1, _REPORT_AT + _REASON_BYTES)


@dataclass(frozen=True, slots=True)
class Report:
    """Why a fork ends itself, and what that counts as for its run."""

    blame: Blame
    reason: str
    run: str | None = None


def note_success() -> None:
    """Note, in a fork, that a run was ended or given back in order."""
    # Two forks at once may count one: that it changes is enough.
    _WELL.pack_into(_shared, 0, (_WELL.unpack_from(_shared)[0] + 1) % 2**63)


def pause_left() -> float:
    """Return the seconds for which the forks must not claim a run."""
    until, _ = _VERDICT.unpack_from(_shared, _VERDICT_AT)
    return max(0.0, float(until) - time.monotonic())


def is_worker_sick() -> bool:
    """Return whether forks died on several documents in a row, with none done in between."""
    return bool(_VERDICT.unpack_from(_shared, _VERDICT_AT)[1])


def leave_report(report: Report) -> None:
    """Leave a report for the main process, from a fork that is about to end."""
    text = f"{report.blame}\n{report.run or ''}\n{report.reason}".encode()[: _REASON_BYTES - 1]
    _shared[_REPORT_AT:] = text.ljust(_REASON_BYTES, b"\0")


def take_report() -> Report | None:
    """Return the report that a fork left, once; None if it was killed without one."""
    text = _shared[_REPORT_AT:].rstrip(b"\0").decode(errors="ignore")
    _shared[_REPORT_AT:] = bytes(_REASON_BYTES)
    if not text:
        return None
    blame, run, reason = text.split("\n", 2)
    return Report(Blame(blame), reason, run or None)


class ForkDeaths:
    """Counts the deaths in a row, in the main process."""

    def __init__(self) -> None:
        self.count = 0
        self.reason = ""
        self._subjects: set[str] = set()
        self._well = _WELL.unpack_from(_shared)[0]

    def add(self, subject: str, reason: str) -> float:
        """Count a death on a run (`subject`). Return the pause until the next claim, in seconds."""
        self.refresh()
        self.count += 1
        self.reason = reason
        self._subjects.add(subject)
        pause = pause_after(self.count)
        self._publish(time.monotonic() + pause)
        return pause

    def refresh(self) -> None:
        """Begin again from zero if a run has ended well since the last look."""
        well = _WELL.unpack_from(_shared)[0]
        if well != self._well:
            self._well, self.count, self.reason = well, 0, ""
            self._subjects.clear()
            self._publish(0.0)

    @property
    def is_worker_sick(self) -> bool:
        """Whether forks died on several documents in a row, with none done in between."""
        return len(self._subjects) >= SEVERAL

    @property
    def trouble(self) -> str | None:
        """What health says: None unless several forks have died in a row."""
        if self.count < SEVERAL:
            return None
        return f"{self.count} processes in a row ended without a result, the last: {self.reason}"

    def _publish(self, until: float) -> None:
        _VERDICT.pack_into(_shared, _VERDICT_AT, until, self.is_worker_sick)


def pause_after(deaths: int) -> float:
    """Return the seconds without a claim after this many deaths in a row."""
    if deaths < SEVERAL:
        return 0.0
    return float(min(_FIRST_PAUSE * 2.0 ** min(deaths - SEVERAL, 16), _LONGEST_PAUSE))
