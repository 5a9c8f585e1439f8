"""Samples of the OCR server's gauges, their diagnosis, and the alarm if the server is starved."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from rag_service.config.options import Settings
from rag_service.diagnosis.bottleneck import (
    ClientMode,
    Diagnosis,
    JobQueue,
    LoadSample,
    Verdict,
    diagnose,
)
from rag_service.jobs import (
    fork_loads,
    live_workers,
    server_outages,
    server_samples,
    server_state,
)
from rag_service.jobs.server_samples import DiagnosedSample, Starvation
from rag_service.monitoring.alarm_webhook import Event, Notifier
from rag_service.ocr.ocr_client import OcrClient
from rag_service.states import ServerState, Stage

log = logging.getLogger(__name__)

# A verdict is made from the means over this number of samples.
_SAMPLES = 4
# Two samples further apart than this number of intervals plus a slow answer leave a gap.
_GAP_INTERVALS = 4
_SLOW_SECONDS = 20.0
# Gauges of an endpoint come from the jobs that ended in these last seconds.
_JOB_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class _Gauges:
    """The server's own gauges."""

    running: float | None = None
    waiting: float | None = None
    slots: int | None = None
    cache_use: float | None = None
    tokens_per_second: float | None = None


class Sampler:
    """Takes samples of one server, every occupancy.sample_every seconds."""

    def __init__(self, settings: Settings, notifier: Notifier | None = None) -> None:
        self._settings = settings
        self._notifier = notifier or Notifier(settings.notify)
        self._sampled_at = float("-inf")
        # Time and value of the last token count; slots as the server last reported them.
        self._last_tokens: tuple[float, float] | None = None
        self._slots: int | None = None
        self._asked_for_slots = False
        # The endpoint's live jobs at the last sample.
        self._jobs = JobQueue()

    def sample_if_due(self) -> None:
        """Take a sample if one is due, store it with its diagnosis, raise or end the alarms."""
        url, now = self._settings.page_server, time.monotonic()
        options = self._settings.occupancy
        if url is None or now - self._sampled_at < options.sample_every:
            return
        self._sampled_at = now
        self._report_outage(url)
        sample = self._sample(url)
        diagnosis = self._diagnose(sample)
        server_samples.add_sample(sample, diagnosis)
        if diagnosis.verdict is Verdict.STARVED:
            self._raise_alarm(sample)
        else:
            self._end_alarm(url, diagnosis)
        server_samples.remove_older(options.sample_retention)
        fork_loads.remove_stale()

    def _sample(self, url: str) -> LoadSample:
        if self._settings.ocr.transport == "runpod":
            gauges, in_flight, limit = self._endpoint_gauges()
        else:
            gauges = asyncio.run(self._server_gauges(url))
            load = fork_loads.total(url)
            in_flight, limit = round(load.in_flight, 1), load.limit
        queue = server_samples.page_queue()
        return LoadSample(
            url=url,
            at=queue.at,
            running=gauges.running,
            waiting=gauges.waiting,
            slots=gauges.slots,
            cache_use=gauges.cache_use,
            in_flight=in_flight,
            limit=limit,
            tokens_per_second=gauges.tokens_per_second,
            pages_per_minute=queue.pages_per_minute,
            pages_waiting=queue.pages_waiting,
        )

    async def _server_gauges(self, url: str) -> _Gauges:
        async with OcrClient(self._settings.ocr, connections=1) as client:
            gauges = await client.gauges()
            if gauges is None:
                self._last_tokens, self._asked_for_slots = None, False
                return _Gauges(slots=self._settings.occupancy.slots)
            if not self._asked_for_slots:
                self._slots = (await client.limits()).slots
                self._asked_for_slots = True
        slots = self._slots or self._settings.occupancy.slots or _learned_slots(url)
        rate = self._rate(gauges.tokens)
        return _Gauges(gauges.running, gauges.waiting, slots, gauges.cache_use, rate)

    def _rate(self, tokens: float | None) -> float | None:
        """Return tokens a second since the last sample, or None after a restart of the server."""
        now, before = time.monotonic(), self._last_tokens
        self._last_tokens = None if tokens is None else (now, tokens)
        if before is None or tokens is None or tokens < before[1]:
            return None
        return (tokens - before[1]) / (now - before[0])

    def _endpoint_gauges(self) -> tuple[_Gauges, float, None]:
        runpod = self._settings.runpod
        jobs = server_samples.endpoint_gauges(
            runpod.api_base, str(runpod.endpoint_id), _JOB_SECONDS
        )
        slots = jobs.slots or self._settings.occupancy.slots
        self._jobs = JobQueue(jobs.live, jobs.queued, jobs.most_pages, runpod.max_pages_per_job)
        return _Gauges(jobs.running, jobs.waiting, slots), jobs.pages, None

    def _diagnose(self, sample: LoadSample) -> Diagnosis:
        record = server_state.get(sample.url)
        if record is not None and record.state is not ServerState.UP:
            return Diagnosis(Verdict.UNKNOWN, f"The server is {record.state}: {record.message}")
        every = self._settings.occupancy.sample_every
        before = server_samples.samples(sample.url, _SAMPLES * every)[1 - _SAMPLES :]
        mode = ClientMode(
            adaptive=self._settings.ocr.pages_in_flight == "auto",
            remote=self._settings.ocr.transport == "runpod",
            low_memory=_all_short_of_memory(),
            jobs=self._jobs,
        )
        return diagnose([*(one.sample for one in before), sample], mode)

    def _report_outage(self, url: str) -> None:
        report = server_outages.next_report(url)
        if report is None:
            return
        if report.is_over:
            self._notify("server_out_over", url, "The server answers again.", report.since)
        else:
            self._notify("server_out", url, report.message, report.since)

    def _raise_alarm(self, sample: LoadSample) -> None:
        """Raise the alarm if the server was starved for occupancy.starved_after seconds."""
        options = self._settings.occupancy
        gap = _GAP_INTERVALS * options.sample_every + _SLOW_SECONDS
        starved = _starved_tail(
            server_samples.samples(sample.url, options.starved_after + gap), gap
        )
        if not starved:
            return
        since = starved[0].sample.at
        if sample.at - since < timedelta(seconds=options.starved_after):
            return
        why = starved[-1].diagnosis.sentence
        if server_samples.raise_starved(sample.url, Starvation(since, why)):
            log.warning("%s has been starved since %s: %s", sample.url, f"{since:%H:%M:%S}", why)
            self._notify("starved", sample.url, why, since)

    def _end_alarm(self, url: str, diagnosis: Diagnosis) -> None:
        alarm = server_samples.end_starved(url)
        if alarm is not None:
            log.info("%s is no longer starved: %s", url, diagnosis.sentence)
            self._notify("starved_over", url, diagnosis.sentence, alarm.since)

    def _notify(self, event: str, url: str, sentence: str, since: datetime) -> None:
        self._notifier.send(Event(event, url, sentence, since.isoformat()))


def _all_short_of_memory() -> bool:
    workers = live_workers.of_stage(Stage.OCR)
    return bool(workers) and all(worker.low_memory for worker in workers)


def _learned_slots(url: str) -> int | None:
    most = server_samples.most_running(url)
    return round(most) if most else None


def _starved_tail(samples: Sequence[DiagnosedSample], gap: float) -> Sequence[DiagnosedSample]:
    """Return the newest samples whose verdict is `starved` without a break or a gap in time."""
    first = len(samples)
    for index in range(len(samples) - 1, -1, -1):
        if samples[index].diagnosis.verdict is not Verdict.STARVED:
            break
        if _seconds_to_next(samples, index) > gap:
            break
        first = index
    return samples[first:]


def _seconds_to_next(samples: Sequence[DiagnosedSample], index: int) -> float:
    if index + 1 == len(samples):
        return 0.0
    return (samples[index + 1].sample.at - samples[index].sample.at).total_seconds()
