"""Keeps the node's layout server running. Used by the ocr worker and the RunPod handler."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

from rag_service.config.option_list import options
from rag_service.config.options import Settings
from rag_service.errors import ConfigurationError, ServiceUnreachable
from rag_service.layout import layout_client
from rag_service.layout.address import layout_address
from rag_service.layout.model_loader import require_model
from rag_service.runtime.supervisor import Program, Supervisor

log = logging.getLogger(__name__)


class LayoutSupervisor:
    """One child: the node's layout server, or the one that takes over after it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._supervisor: Supervisor | None = None

    def start(self) -> None:
        """Return when the node's layout server answers, where this node needs one.

        Raises ConfigurationError where its model cannot load.
        """
        settings = self._settings
        if not settings.needs_layout_server:
            return
        require_model(settings.layout)
        self._supervisor = Supervisor()
        try:
            self._supervisor.start(self._program())
        except ServiceUnreachable as error:
            self.stop()
            raise ConfigurationError(
                f"layout.model: {settings.layout.model} cannot load; the layout server's last "
                f"lines say why. {error.message}"
            ) from error
        here, wanted = layout_client.readiness(settings).model, settings.layout.model
        log.info("The layout server answers at %s", layout_address(settings))
        if here != wanted:
            log.warning("This node's layout server has the model %s, not %s", here, wanted)

    def stop(self) -> None:
        """Stop our child; where it served, the next in line takes over."""
        if self._supervisor is not None:
            self._supervisor.stop()

    @property
    def restarts(self) -> int:
        """How often the child was started again."""
        status = self._supervisor.status() if self._supervisor else []
        return sum(child.restarts for child in status)

    def _program(self) -> Program:
        # Not the command: RunPod's image has no command line.
        return Program(
            name="layout-server",
            argv=(sys.executable, "-P", "-m", "workers.servers.layout.layout_server"),
            env=_environment(os.environ),
            ready=self._answers,
            ready_seconds=self._settings.layout.start_timeout,
        )

    def _answers(self) -> bool:
        return layout_client.readiness(self._settings).ok


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Ours without the secrets: it decodes pictures and needs none."""
    secret = {name for option in options() if option.secret for name in option.variables}
    return {name: value for name, value in ours.items() if name not in secret}
