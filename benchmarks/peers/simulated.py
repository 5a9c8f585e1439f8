"""The simulated server as a process of its own, its time unscaled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import httpx

from tests.simulators.simulated_batch import Batch, Rates


@dataclass(frozen=True)
class Times:
    """When page requests came and were answered, in the server's seconds; clients that left."""

    came: Sequence[float]
    answered: Sequence[float]
    left: int

    @property
    def seconds(self) -> float:
        """From the first request to the last answer."""
        return max(self.answered) - min(self.came)

    @property
    def in_flight(self) -> float:
        """The mean over that time; all requests must have been answered."""
        return (sum(self.answered) - sum(self.came)) / self.seconds


@dataclass(frozen=True)
class Simulated:
    """A running server."""

    url: str

    def times(self) -> Times:
        answer = httpx.get(f"{self.url}/times", trust_env=False)
        return Times(**answer.raise_for_status().json())


@contextmanager
def simulated(name: str) -> Iterator[Simulated]:
    """A fresh server of the name, with vLLM's gauges, on a free port."""
    command = [sys.executable, "-m", "tests.simulators.simulated_server", name, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Simulated(process.stdout.readline().strip())
        finally:
            process.terminate()


def own_answers(rates: Rates, pages: int) -> list[float]:
    """Return when a fresh server answers each page if it always has enough: its own time.

    Half as many wait as it has slots: no slot idles, and its front end is not choked by all pages
    side by side.
    """
    batch, answered, to_come = Batch(rates), list[float](), iter(range(pages))
    for page in islice(to_come, rates.slots + rates.slots // 2):
        batch.arrive(page)
    while batch.in_flight:
        ended = batch.advance(batch.next_event())
        answered += [batch.now] * len(ended)
        for page in islice(to_come, len(ended)):
            batch.arrive(page)
    return answered
