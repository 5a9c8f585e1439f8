"""Keeps the node's layout server running."""

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
    """One child process: the node's layout server, or the one that takes over when it ends."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._supervisor: Supervisor | None = None

    def start(self) -> None:
        """Start the layout server and wait until it answers, if this node needs one.

        Raises ConfigurationError if its model cannot load.
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
        loaded, wanted = layout_client.readiness(settings).model, settings.layout.model
        log.info("The layout server answers at %s", layout_address(settings))
        if loaded != wanted:
            log.warning("This node's layout server has the model %s, not %s", loaded, wanted)

    def stop(self) -> None:
        """Stop the child; another layout server of the node takes over, if one waits."""
        if self._supervisor is not None:
            self._supervisor.stop()

    @property
    def restarts(self) -> int:
        """The number of restarts of the child."""
        status = self._supervisor.status() if self._supervisor else []
        return sum(child.restarts for child in status)

    def _program(self) -> Program:
        # Not `rag-service layout-server`: RunPod's image has no command line.
        return Program(
            name="layout-server",
            argv=(sys.executable, "-P", "-m", "workers.servers.layout.layout_server"),
            env=_environment(os.environ),
            ready=self._answers,
            ready_seconds=self._settings.layout.start_timeout,
        )

    def _answers(self) -> bool:
        return layout_client.readiness(self._settings).ok


def _environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without the secrets, which the server does not need."""
    secret = {name for option in options() if option.secret for name in option.variables}
    return {name: value for name, value in inherited.items() if name not in secret}
