"""Starts and stops an ocr worker's layout server: a bootstep of Celery."""

from __future__ import annotations

import logging
from typing import Any

from celery import bootsteps, signals

from rag_service.config.loader import get_settings
from rag_service.errors import ConfigurationError
from rag_service.states import Stage
from workers.servers.layout.layout_supervisor import LayoutSupervisor

log = logging.getLogger(__name__)


class LayoutStep(bootsteps.Step):  # type: ignore[misc]
    """Runs the layout server of an ocr worker from before the first fork until after the last."""

    def include_if(self, worker: Any) -> bool:
        """Return True for a worker that reads pages."""
        return Stage.OCR.value in worker.app.amqp.queues.consume_from

    def create(self, worker: Any) -> None:  # noqa: ARG002
        """Start the server. Raises SystemExit(2), which Celery lets pass, if it cannot load."""
        layout = LayoutSupervisor(get_settings())
        try:
            layout.start()
        except ConfigurationError as error:
            log.critical("%s", error.message)
            raise SystemExit(2) from error
        # Not when the steps are stopped, as forks then still read the pages in progress.
        signals.worker_shutdown.connect(lambda **_: layout.stop(), weak=False)
