"""Celery's pool of forks, changed so that a lost fork is noticed at once."""

from __future__ import annotations

from typing import Any

from celery.concurrency.asynpool import AsynPool
from celery.concurrency.prefork import TaskPool as Prefork

# A process that has closed its files only has to exit.
_EXIT_SECONDS = 5.0


class ForkPool(AsynPool):  # type: ignore[misc]
    """A pool that replaces a fork as soon as it ends.

    A fork's sentinel closes a moment before the fork can be waited for. Celery 5.6 looks in that
    moment, sees a live process, stops watching it, and finds the loss seconds later. If the
    connection to the broker is renewed meanwhile, the whole worker ends ("file descriptor is
    None").
    """

    def _event_process_exit(self, hub: Any, proc: Any) -> None:
        proc.join(_EXIT_SECONDS)
        super()._event_process_exit(hub, proc)


class TaskPool(Prefork):  # type: ignore[misc]
    """The class that Celery's setting `worker_pool` names."""

    Pool = ForkPool
