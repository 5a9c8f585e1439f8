"""Log lines that travel in a job's answer, since RunPod's worker logs are out of reach."""

from __future__ import annotations

import logging
from collections import deque

_LINES, _LENGTH = 200, 500
_OURS = ("rag_service", "workers")


class DebugLines(logging.Handler):
    """Keeps the last lines of our own loggers; warnings and errors of all."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
        self._lines: deque[str] = deque(maxlen=_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(_OURS) or record.levelno >= logging.WARNING:
            self._lines.append(self.format(record)[:_LENGTH])

    def taken(self) -> list[str]:
        """The lines since the last call; concurrency is one, so they are those of one job."""
        lines = list(self._lines)
        self._lines.clear()
        return lines


def collect() -> DebugLines:
    """Start keeping lines."""
    lines = DebugLines()
    logging.getLogger().addHandler(lines)
    return lines
