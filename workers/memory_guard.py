"""Keeps an ocr fork from claiming a run while the machine is short of memory."""

from __future__ import annotations

import logging

from rag_service.config.options import Settings
from rag_service.runtime.memory import available_mib, has_enough_memory

log = logging.getLogger(__name__)


class MemoryGuard:
    """Decides whether a run may be claimed; logs when the answer changes."""

    def __init__(self) -> None:
        self._allowed = True

    def allows_claim(self, settings: Settings) -> bool:
        """Return whether a run may be claimed now."""
        before, self._allowed = self._allowed, has_enough_memory(settings)
        least = settings.memory_guard.min_available_mib
        if before and not self._allowed:
            log.warning(
                "No run is claimed: %s MiB of memory are available, "
                "memory_guard.min_available_mib is %d.",
                available_mib(), least,
            )  # fmt: skip
        elif self._allowed and not before:
            log.info("Runs are claimed again: at least %d MiB of memory are available.", least)
        return self._allowed
