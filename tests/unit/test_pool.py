"""The pool of forks: a fork that is ending counts as ended."""

from __future__ import annotations

import os
import time

import billiard
from billiard.connection import wait
from celery.concurrency.asynpool import AsynPool

from workers import celery_pool
from workers.celery_pool import ForkPool


def test_a_fork_whose_sentinel_has_closed_is_waited_for(monkeypatch):
    """Otherwise Celery would take it for alive and stop watching it."""
    seen = []
    monkeypatch.setattr(celery_pool, "_EXIT_SECONDS", 60)
    monkeypatch.setattr(
        AsynPool, "_event_process_exit", lambda pool, hub, fork: seen.append(fork.exitcode)
    )
    fork = billiard.Process(target=_end_slowly)
    fork.start()
    wait([fork.sentinel])
    assert fork.exitcode is None
    ForkPool._event_process_exit(object.__new__(ForkPool), None, fork)
    assert seen == [3]


def _end_slowly() -> None:
    os.closerange(0, 256)
    time.sleep(2)
    os._exit(3)
