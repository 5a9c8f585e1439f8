"""Celery's pool of forks, which notices a lost fork at once. Named by workers/celery_app.py."""

from __future__ import annotations

from typing import Any

from celery.concurrency.asynpool import AsynPool
from celery.concurrency.prefork import TaskPool as Prefork

# Between closing its files and being gone a process does nothing but end.
_ENDING_SECONDS = 5.0


class ForkPool(AsynPool):  # type: ignore[misc]
    """A pool that mends itself when a fork ends.

    A fork's sentinel closes a moment before the fork can be waited for. Celery 5.6 looks in that
    moment, sees a live process, stops to watch it, and finds the loss only seconds later; if the
    broker's connection is made anew meanwhile, the whole worker ends ("file descriptor is None").
    """

    def _event_process_exit(self, hub: Any, proc: Any) -> None:
        proc.join(_ENDING_SECONDS)
        super()._event_process_exit(hub, proc)


class TaskPool(Prefork):  # type: ignore[misc]
    """What Celery's setting `worker_pool` takes."""

    Pool = ForkPool
