"""Prometheus metrics: the database's figures at scrape time, and this process's own counts.

The database's figures are the same in every process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from rag_service.config.options import Settings
from rag_service.database.engine import DatabaseError
from rag_service.database.totals import DatabaseTotals, JobTotals, read_totals
from rag_service.diagnosis.bottleneck import Verdict
from rag_service.errors import ConfigurationError
from rag_service.jobs import (
    held_stages,
    limit_changes,
    live_workers,
    server_samples,
    server_state,
    wake_ups,
)
from rag_service.jobs.held_stages import HeldStage
from rag_service.jobs.limit_changes import LimitChange
from rag_service.jobs.live_workers import LiveWorker
from rag_service.jobs.server_samples import DiagnosedSample
from rag_service.jobs.server_state import ServerRecord
from rag_service.layout.address import is_known
from rag_service.layout.layout_client import get
from rag_service.monitoring.disk_space import free_bytes
from rag_service.runpod.runpod_client import JobStatus
from rag_service.states import JobOutcome, JobState, PageState, RunState, ServerState, Stage

log = logging.getLogger(__name__)

_NAME = "rag_service_"
# Seconds; uploads of a gigabyte and answers in a millisecond share one histogram.
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)


class Telemetry:
    """The metrics of one API process."""

    def __init__(self, settings: Settings, incoming: Callable[[], Path | None]) -> None:
        """`incoming` returns the folder for uploads, None if the document store fails."""
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_DatabaseCollector(settings))
        self._registry.register(_BrokerCollector())
        self._registry.register(_DiskCollector(settings, incoming))
        if settings.uses_layout:
            self._registry.register(_LayoutCollector(settings))
        self._requests = Counter(
            _NAME + "http_requests",
            "HTTP requests answered.",
            ["method", "route", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            _NAME + "http_request_seconds",
            "Seconds from the head of a request to the end of its answer.",
            ["method", "route"],
            buckets=_BUCKETS,
            registry=self._registry,
        )

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one request."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus's text format; queries the database and the broker."""
        return generate_latest(self._registry)


class _DatabaseCollector(Collector):
    """Figures from the database. If it is unreachable, `database_up 0` alone: no scrape fails."""

    def __init__(self, settings: Settings) -> None:
        self._fresh = settings.occupancy.fresh
        self._server = settings.page_server
        self._held_after = settings.worker.held_after

    def collect(self) -> Iterator[Metric]:
        try:
            totals = read_totals()
            workers = [worker for stage in Stage for worker in live_workers.of_stage(stage)]
            held = held_stages.held_stages(self._held_after, self._server)
            servers = server_samples.latest(self._fresh, self._server)
            changes = limit_changes.last_changes()
            record = server_state.get(self._server) if self._server else None
        except (DatabaseError, ConfigurationError) as error:
            log.warning("Metrics without the database's figures: %s", error)
            yield _gauge("database_up", "1 if PostgreSQL answers, else 0.", 0)
            return
        yield _gauge("database_up", "1 if PostgreSQL answers, else 0.", 1)
        yield from _document_metrics(totals)
        yield from _worker_metrics(workers)
        yield from _held_metrics(held)
        yield from _job_metrics(totals.jobs)
        yield from _server_metrics(servers)
        yield _server_up(record)
        yield _limit_changes(changes)


class _BrokerCollector(Collector):
    """Figures from the broker. If it is unreachable, `broker_up 0` alone."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        lengths = {stage: wake_ups.queue_length(stage) for stage in Stage}
        known = {stage: length for stage, length in lengths.items() if length is not None}
        up = len(known) == len(lengths)
        yield _gauge("broker_up", "1 if the broker answers, else 0.", int(up))
        yield _family(
            "wake_up_messages", "Wake-up messages that no worker has received yet.", "stage", known
        )


class _DiskCollector(Collector):
    """The document store, and free space. If it is unreachable, `storage_up 0`."""

    def __init__(self, settings: Settings, incoming: Callable[[], Path | None]) -> None:
        self._settings = settings
        self._incoming = incoming

    def collect(self) -> Iterator[GaugeMetricFamily]:
        incoming = self._incoming()
        yield _gauge("storage_up", "1 if the document store works, else 0.", int(bool(incoming)))
        free = free_bytes(self._settings, incoming)
        yield _family(
            "disk_free_bytes", "Free bytes of the disks for documents and data.", "use", free
        )
        least = self._settings.storage.min_free_bytes
        yield _gauge("disk_min_free_bytes", "Free bytes below which a disk is low.", least)


class _LayoutCollector(Collector):
    """The layout server's own metrics: it listens on a socket that no scraper can reach.

    None if this node has no layout server; if it is unreachable, `layout_up 0` alone.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def collect(self) -> Iterator[Metric]:
        if not is_known(self._settings):
            return
        try:
            text = get(self._settings, "/metrics").raise_for_status().text
        except httpx.HTTPError as error:
            log.warning("Metrics without the layout server's figures: %s", error)
            text = ""
        yield _gauge("layout_up", "1 if the layout server answers, else 0.", int(bool(text)))
        yield from text_string_to_metric_families(text)


def _document_metrics(totals: DatabaseTotals) -> Iterator[GaugeMetricFamily]:
    runs = _complete(RunState, totals.runs)
    documents = _complete(RunState, totals.documents)
    active = _complete(PageState, totals.active_pages)
    yield _family("runs", "Runs by state.", "state", runs)
    yield _family("documents", "Documents by the state of their current run.", "status", documents)
    yield _gauge("pages", "Pages of all current runs.", totals.pages)
    yield _family("active_pages", "Pages of runs that have not ended.", "state", active)
    yield _family(
        "oldest_waiting_seconds",
        "Seconds since the oldest run that waits for a stage was added.",
        "stage",
        totals.oldest_waiting,
    )


def _worker_metrics(live: list[LiveWorker]) -> Iterator[GaugeMetricFamily]:
    workers = dict.fromkeys(Stage, 0)
    forks = dict.fromkeys(Stage, 0)
    busy = dict.fromkeys(Stage, 0)
    deaths = dict.fromkeys(Stage, 0)
    for worker in live:
        deaths[worker.stage] += worker.fork_deaths
        workers[worker.stage] += 1
        forks[worker.stage] += worker.forks
        busy[worker.stage] += worker.busy
    yield _family("workers", "Workers with a recent heartbeat.", "stage", workers)
    yield _family("forks", "Forks of live workers.", "stage", forks)
    yield _family("forks_busy", "Forks that hold a run.", "stage", busy)
    yield _family(
        "fork_deaths_in_a_row",
        "Forks of live workers that ended since one last ended a run in order.",
        "stage",
        deaths,
    )


def _held_metrics(held: Sequence[HeldStage]) -> Iterator[GaugeMetricFamily]:
    seconds = dict.fromkeys(Stage, 0.0) | {one.stage: one.seconds for one in held}
    yield _family(
        "stage_held_seconds",
        "Seconds for which all forks of the stage were held while documents wait; 0 if they work.",
        "stage",
        seconds,
    )
    holders = GaugeMetricFamily(
        _NAME + "holder_seconds",
        "Seconds for which each document has held a fork of such a stage.",
        labels=["stage", "document", "filename"],
    )
    for one in held:
        for holder in one.holders:
            labels = [one.stage, holder.document_id, holder.filename]
            holders.add_metric(labels, holder.seconds)
    yield holders


# A live job has RunPod's last status, or the state of its post if RunPod has reported none.
_LIVE = (
    *(status.value for status in JobStatus if not status.final),
    *(state.value for state in JobState if state is not JobState.ENDED),
)
# Unknown statuses must not become time series.
_OTHER = "other"


def _job_metrics(jobs: JobTotals) -> Iterator[GaugeMetricFamily]:
    live = dict.fromkeys((*_LIVE, _OTHER), 0)
    for word, count in jobs.live.items():
        live[word if word in live else _OTHER] += count
    ended = _complete(JobOutcome, jobs.ended)
    yield _family("remote_jobs_live", "Live jobs on RunPod by their last status.", "status", live)
    yield _family("remote_jobs_ended", "Ended jobs by outcome.", "outcome", ended)
    yield _gauge("remote_gpu_seconds", "GPU seconds of all jobs, a lower bound.", jobs.gpu_seconds)
    yield _gauge("remote_usd", "Cost of all jobs in US dollars, a lower bound.", jobs.usd)


# Fields of LoadSample; a gauge that the server does not have makes no series.
_SERVER_FIGURES = {
    "running": "Requests that run in the OCR server.",
    "waiting": "Requests that wait in the OCR server.",
    "slots": "Requests that the OCR server can batch.",
    "cache_use": "Share of the OCR server's KV cache in use.",
    "in_flight": "Requests that all forks have open on the OCR server.",
    "tokens_per_second": "Tokens that the OCR server generates per second.",
    "pages_per_minute": "Pages read in the last minute.",
    "pages_waiting": "Pages that wait to be sent to the OCR server.",
}


def _server_metrics(servers: Sequence[DiagnosedSample]) -> Iterator[GaugeMetricFamily]:
    for field, meaning in _SERVER_FIGURES.items():
        values = {one.sample.url: getattr(one.sample, field) for one in servers}
        known = {url: value for url, value in values.items() if value is not None}
        yield _family(f"server_{field}", meaning, "server", known)
    verdicts = GaugeMetricFamily(
        _NAME + "server_verdict",
        "1 for what limits the pages per minute of the OCR server, else 0.",
        labels=["server", "verdict"],
    )
    for one in servers:
        for verdict in Verdict:
            value = int(one.diagnosis.verdict is verdict)
            verdicts.add_metric([one.sample.url, verdict], value)
    yield verdicts


def _server_up(record: ServerRecord | None) -> GaugeMetricFamily:
    """No series if nothing was ever sent to the server; 0 also while one document tests it."""
    up = {record.url: int(record.state is ServerState.UP)} if record else {}
    meaning = "1 if the OCR server reads pages, 0 in an outage, in which documents wait."
    return _family("server_up", meaning, "server", up)


def _limit_changes(changes: Sequence[LimitChange]) -> CounterMetricFamily:
    family = CounterMetricFamily(
        _NAME + "limit_changes",
        "Changes of the requests in flight of all forks, by reason.",
        labels=["server", "reason"],
    )
    for change in changes:
        family.add_metric([change.url, change.reason], change.count)
    return family


def _gauge(name: str, meaning: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(_NAME + name, meaning, value=value)


def _complete(states: type[StrEnum], counts: Mapping[str, int]) -> dict[str, int]:
    """Add a 0 for each missing state: an absent series would look like a failed scrape."""
    return {state.value: 0 for state in states} | dict(counts)


def _family(name: str, meaning: str, label: str, values: Mapping[Any, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(_NAME + name, meaning, labels=[label])
    for key, value in values.items():
        family.add_metric([str(key)], value)
    return family
