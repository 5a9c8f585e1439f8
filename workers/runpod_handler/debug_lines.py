"""Log lines that a job's answer includes, because the service cannot read RunPod's worker logs."""

from __future__ import annotations

import logging
from collections import deque

_LINES, _LENGTH = 200, 500
_PACKAGES = ("rag_service", "workers")


class DebugLines(logging.Handler):
    """The last lines of this project's loggers, and warnings and errors of all others."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
        self._lines: deque[str] = deque(maxlen=_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(_PACKAGES) or record.levelno >= logging.WARNING:
            self._lines.append(self.format(record)[:_LENGTH])

    def take(self) -> list[str]:
        """Return the lines since the last call: one job's, because jobs run one at a time."""
        lines = list(self._lines)
        self._lines.clear()
        return lines


def collect() -> DebugLines:
    """Start keeping lines."""
    lines = DebugLines()
    logging.getLogger().addHandler(lines)
    return lines
