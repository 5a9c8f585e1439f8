"""Looks how full the OCR server is, says who is the bottleneck, and raises the alarm when it
starves. Used by maintenance, beside its rounds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from rag_service.config.options import Settings
from rag_service.diagnosis.bottleneck import Diagnosis, Feed, LoadSample, Verdict, diagnose
from rag_service.jobs import fork_loads, live_workers, server_samples, server_state
from rag_service.jobs.server_samples import DiagnosedSample, Starvation
from rag_service.monitoring.alarm_webhook import Event, Notifier
from rag_service.ocr.ocr_client import OcrClient
from rag_service.states import ServerState, Stage

log = logging.getLogger(__name__)

# A verdict is of the means over so many samples.
_SAMPLES = 4
# Two samples further apart than so many usual gaps, and a slow answer, leave a time unseen.
_GAPS = 4
_SLOW_SECONDS = 20.0
# Jobs that ended in the last seconds speak for the endpoint.
_JOB_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class _Look:
    """What the server itself said."""

    running: float | None = None
    waiting: float | None = None
    slots: int | None = None
    cache_use: float | None = None
    tokens_per_second: float | None = None


class Sampler:
    """One server's samples, every occupancy.sample_every."""

    def __init__(self, settings: Settings, notifier: Notifier | None = None) -> None:
        self._settings = settings
        self._notifier = notifier or Notifier(settings.notify)
        self._looked_at = float("-inf")
        # When tokens were last counted, and how many; the slots since the server last answered.
        self._counted: tuple[float, float] | None = None
        self._slots: int | None = None
        self._asked_for_slots = False

    def look(self) -> None:
        """Take a sample if one is due, judge it with those before, raise or end the alarm."""
        url, now = self._settings.page_server, time.monotonic()
        options = self._settings.occupancy
        if url is None or now - self._looked_at < options.sample_every:
            return
        self._looked_at = now
        sample = self._sample(url)
        diagnosis = self._judge(sample)
        server_samples.add_sample(sample, diagnosis)
        if diagnosis.verdict is Verdict.STARVED:
            self._note_starved(sample)
        else:
            self._end_alarm(url, diagnosis)
        server_samples.remove_older(options.sample_retention)
        fork_loads.remove_stale()

    def _sample(self, url: str) -> LoadSample:
        if self._settings.ocr.transport == "runpod":
            look, in_flight, limit = self._of_jobs()
        else:
            look = asyncio.run(self._of_server(url))
            ours = fork_loads.total(url)
            in_flight, limit = round(ours.in_flight, 1), ours.limit
        demand = server_samples.page_queue()
        return LoadSample(
            url=url,
            at=demand.at,
            running=look.running,
            waiting=look.waiting,
            slots=look.slots,
            cache_use=look.cache_use,
            in_flight=in_flight,
            limit=limit,
            tokens_per_second=look.tokens_per_second,
            pages_per_minute=demand.pages_per_minute,
            pages_waiting=demand.pages_waiting,
        )

    async def _of_server(self, url: str) -> _Look:
        async with OcrClient(self._settings.ocr, connections=1) as client:
            gauges = await client.gauges()
            if gauges is None:
                self._counted, self._asked_for_slots = None, False
                return _Look(slots=self._settings.occupancy.slots)
            if not self._asked_for_slots:
                self._slots = (await client.limits()).slots
                self._asked_for_slots = True
        slots = self._slots or self._settings.occupancy.slots or _learned_slots(url)
        rate = self._rate(gauges.tokens)
        return _Look(gauges.running, gauges.waiting, slots, gauges.cache_use, rate)

    def _rate(self, tokens: float | None) -> float | None:
        """Tokens a second since the last look; None where a server began to count anew."""
        now, before = time.monotonic(), self._counted
        self._counted = None if tokens is None else (now, tokens)
        if before is None or tokens is None or tokens < before[1]:
            return None
        return (tokens - before[1]) / (now - before[0])

    def _of_jobs(self) -> tuple[_Look, float, None]:
        runpod = self._settings.runpod
        jobs = server_samples.endpoint_gauges(
            runpod.api_base, str(runpod.endpoint_id), _JOB_SECONDS
        )
        slots = jobs.slots or self._settings.occupancy.slots
        return _Look(jobs.running, jobs.waiting, slots), jobs.pages, None

    def _judge(self, sample: LoadSample) -> Diagnosis:
        record = server_state.get(sample.url)
        if record is not None and record.state is not ServerState.UP:
            return Diagnosis(Verdict.UNKNOWN, f"It is out: {record.message}")
        every = self._settings.occupancy.sample_every
        before = server_samples.samples(sample.url, _SAMPLES * every)[1 - _SAMPLES :]
        feed = Feed(
            adaptive=self._settings.ocr.pages_in_flight == "auto",
            remote=self._settings.ocr.transport == "runpod",
            low_memory=_all_short_of_memory(),
        )
        return diagnose([*(judged.sample for judged in before), sample], feed)

    def _note_starved(self, sample: LoadSample) -> None:
        """Raise the alarm once the server has starved for long without a break."""
        options = self._settings.occupancy
        gap = _GAPS * options.sample_every + _SLOW_SECONDS
        stretch = _starved(server_samples.samples(sample.url, options.starved_after + gap), gap)
        if not stretch:
            return
        since = stretch[0].sample.at
        if sample.at - since < timedelta(seconds=options.starved_after):
            return
        why = stretch[-1].diagnosis.sentence
        if server_samples.raise_starved(sample.url, Starvation(since, why)):
            log.warning("%s is starved since %s: %s", sample.url, f"{since:%H:%M:%S}", why)
            self._tell("starved", sample.url, why, Starvation(since, why))

    def _end_alarm(self, url: str, diagnosis: Diagnosis) -> None:
        alarm = server_samples.end_starved(url)
        if alarm is not None:
            log.info("%s is no longer starved: %s", url, diagnosis.sentence)
            self._tell("starved_over", url, diagnosis.sentence, alarm)

    def _tell(self, event: str, url: str, sentence: str, alarm: Starvation) -> None:
        self._notifier.tell(Event(event, url, sentence, alarm.since.isoformat()))


def _all_short_of_memory() -> bool:
    loads = live_workers.of_stage(Stage.OCR)
    return bool(loads) and all(load.low_memory for load in loads)


def _learned_slots(url: str) -> int | None:
    most = server_samples.most_running(url)
    return round(most) if most else None


def _starved(judged: Sequence[DiagnosedSample], gap: float) -> Sequence[DiagnosedSample]:
    """The newest samples that say `starved` one after the other, with no time unseen."""
    first = len(judged)
    for index in range(len(judged) - 1, -1, -1):
        if judged[index].diagnosis.verdict is not Verdict.STARVED:
            break
        if _seconds_to_next(judged, index) > gap:
            break
        first = index
    return judged[first:]


def _seconds_to_next(judged: Sequence[DiagnosedSample], index: int) -> float:
    if index + 1 == len(judged):
        return 0.0
    return (judged[index + 1].sample.at - judged[index].sample.at).total_seconds()
