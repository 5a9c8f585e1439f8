"""Thresholds of the diagnosis: from which figure on a server counts as full, starved and so on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DiagnosisThresholds:
    """Thresholds for live samples and for probes.

    A "share" is a fraction from 0 to 1. Requests are means over the samples of a minute or over a
    probe's step. The sources are runs of vLLM and SGLang on one H200, and the simulated servers in
    benchmarks/occupancy.py.
    """

    # Share of the slots. Requests come and go, so a full server runs slightly fewer than it has.
    full_slots_share: float = 0.9
    # Slots that may be free in a full server: a sample of one slot shows all or nothing.
    free_slots: float = 0.4
    # Share of the slots from which on an endpoint's jobs keep its servers busy.
    busy_slots_share: float = 0.5
    # Share of the KV cache. vLLM and SGLang preempt requests from about here on.
    full_cache_share: float = 0.9

    # Requests that wait, below which a single request waits only now and then.
    some_waiting: float = 0.5
    # Requests that wait in a probe's step, which has few samples.
    probe_waiting: float = 1.0
    # Requests that wait, and their share of those that run. More than both adds only latency.
    many_waiting: float = 4.0
    many_waiting_share: float = 0.5

    # Requests in flight for each that runs or waits; the others are in the front end. The higher
    # figure applies if the number in flight was neither searched for nor near the slots.
    front_end_ratio: float = 1.4
    clear_front_end_ratio: float = 3.0
    # Requests in flight; with fewer, the ratio says nothing.
    front_end_in_flight: float = 4.0
    # Share of a probe's open requests that must run, else the rest is in the front end.
    probe_running_share: float = 0.75

    # Share of the forks' limits that must be used; samples are moments between which pages end.
    used_limit_share: float = 0.6
    # Factor between a minute's lowest and highest limit; above it the search still changes it.
    moving_limit_factor: float = 1.5
    # In flight, at which a search without gauges ends on a server that reads one page at a time.
    serial_in_flight: float = 2.0


THRESHOLDS = DiagnosisThresholds()
