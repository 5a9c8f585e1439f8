"""The layout server in an ocr worker's life: a bootstep of Celery. Added by celery_app."""

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
    """The layout server of an ocr worker: there before the first fork, gone after the last."""

    def include_if(self, worker: Any) -> bool:
        """Only a worker that reads pages."""
        return Stage.OCR.value in worker.app.amqp.queues.consume_from

    def create(self, worker: Any) -> None:  # noqa: ARG002
        """Raises SystemExit(2), which alone gets through Celery, where the model cannot load."""
        layout = LayoutSupervisor(get_settings())
        try:
            layout.start()
        except ConfigurationError as error:
            log.critical("%s", error.message)
            raise SystemExit(2) from error
        # Not when the steps are stopped: forks still read the pages in hand then.
        signals.worker_shutdown.connect(lambda **_: layout.stop(), weak=False)
