"""Keeps an ocr fork from claiming while the machine is short of memory. Used by stage."""

from __future__ import annotations

import logging

from rag_service.config.options import Settings
from rag_service.runtime.memory import available_mib, has_room

log = logging.getLogger(__name__)


class MemoryGuard:
    """Says once that it closes, and once that it opens again."""

    def __init__(self) -> None:
        self._open = True

    def is_open(self, settings: Settings) -> bool:
        """Whether a run may be claimed now."""
        before, self._open = self._open, has_room(settings)
        least = settings.memory_guard.min_available_mib
        if before and not self._open:
            log.warning(
                "Nothing is claimed: %s MiB of memory are available, memory_guard wants %d.",
                available_mib(), least,
            )  # fmt: skip
        elif self._open and not before:
            log.info("Runs are claimed again: over %d MiB of memory are available.", least)
        return self._open
