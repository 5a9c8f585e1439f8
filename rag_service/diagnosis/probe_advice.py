"""Advice from a probe's findings: what limits the server, and settings for it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from rag_service.diagnosis import remedies
from rag_service.diagnosis.bottleneck import Verdict
from rag_service.diagnosis.thresholds import THRESHOLDS
from rag_service.ocr.probe.findings import (
    Choice,
    Ending,
    Findings,
    Growth,
    Step,
    growth,
    in_flight_with_cpu,
    rests_on_lack_of_cpu,
    with_throughput,
)
from rag_service.runtime.plural import counted

_SENTENCES = {
    Verdict.UNKNOWN: (
        "Too little was measured to say what limits the server; let the probe go further, or give "
        "it more time (--seconds)."
    ),
    Verdict.FRONT_END_BOUND: (
        f"Requests are open but neither run nor wait: {remedies.FRONT_END_BOUND.meaning}. "
        f"{remedies.ONLY_LATENCY} {remedies.FRONT_END_BOUND.action}"
    ),
    Verdict.KV_BOUND: str(remedies.KV_BOUND),
    Verdict.SATURATED: (
        f"The server is working at its limit. {remedies.ONLY_LATENCY} {remedies.SATURATED.action}"
    ),
    Verdict.OVERLOADED: "The server failed under the last load; use the settings given here.",
    Verdict.SERIALISING: (
        f"The server reads one page at a time. {remedies.ONLY_LATENCY} "
        f"{remedies.SERIALISING.action}"
    ),
}
# If throughput still grew at the end.
_GROWING = {
    Ending.MOST: "The server could take more than was sent; raise --most to find its limit.",
    Ending.INTERRUPTED: "The server could take more than was sent; let the probe run to its end.",
}
# If the probe was not allowed to try more in flight.
_FORBIDDEN = {
    Ending.LATENCY: (
        "More in flight may bring more pages, but answers already take longer than --max-latency; "
        "raise it to find out."
    ),
    Ending.TIMEOUT: (
        "More in flight may bring more pages, but answers could then take longer than "
        "ocr.read_timeout; raise it to find out."
    ),
}
_ENDINGS = {
    Ending.SERIALISES: "more in flight brought no more pages",
    Ending.NO_GROWTH: "two doublings brought less than 5 % more pages",
    Ending.LATENCY: "answers took longer than --max-latency",
    Ending.TIMEOUT: "twice as many could have exceeded ocr.read_timeout",
    Ending.ERROR: "a request failed",
    Ending.MOST: "--most was reached",
    Ending.INTERRUPTED: "it was interrupted",
}


class Advice(BaseModel):
    """What limits the server, and the environment that suits each objective.

    `empty_answers`: the number of `all_answers` without any text.
    """

    model_config = ConfigDict(frozen=True)

    verdict: Verdict
    sentence: str
    settings_for_throughput: dict[str, str]
    settings_for_latency: dict[str, str]
    error: str | None
    probe_was_busy: bool
    all_answers: int
    empty_answers: int

    def lines(self, findings: Findings) -> list[str]:
        """Return the advice as lines of text."""
        error = f": {self.error}" if self.error else ""
        return [
            *self._warnings(),
            f"{_kind(findings)}; {_slots(findings)}.",
            f"{self.verdict}: {self.sentence}",
            f"For throughput: {_outcome(findings.throughput)}.",
            f"    {_assignments(self.settings_for_throughput)}",
            f"For latency: {_outcome(findings.latency)}.",
            f"    {_assignments(self.settings_for_latency)}",
            "One of these forks (OCR_WORKER_CONCURRENCY) is reserved for interactive documents.",
            "GLMOCR_PIPELINE_MAX_WORKERS=auto, the default, finds the number automatically for "
            "RAG_SERVICE_OCR_OBJECTIVE=throughput or latency.",
            f"The probe stopped because {_ENDINGS[findings.ending]}{error}.",
        ]

    def _warnings(self) -> list[str]:
        warnings = []
        if self.empty_answers:
            warnings.append(
                f"Warning: {self.empty_answers} of {self.all_answers} answers were empty, although "
                "every page is full of text. The model may not be an OCR model: choose another "
                "with --model. Or the pages are too small to read: raise --dpi."
            )
        # The sentence of the verdict UNKNOWN already says it.
        if self.probe_was_busy and self.verdict is not Verdict.UNKNOWN:
            warnings.append(
                "Warning: the probe itself was at its limit; run it on a machine with more CPU."
            )
        return warnings


def advise(steps: Sequence[Step], findings: Findings, forks: int) -> Advice:
    """Return the advice; `forks`: the ocr worker's forks, which share the requests in flight."""
    verdict, sentence = _diagnose_steps(steps, findings)
    return Advice(
        verdict=verdict,
        sentence=sentence,
        settings_for_throughput=_fixed(findings.throughput, forks),
        settings_for_latency=_fixed(findings.latency, forks),
        error=steps[-1].error,
        probe_was_busy=any(step.lacked_cpu for step in steps),
        all_answers=sum(step.answers for step in steps),
        empty_answers=sum(step.empty for step in steps),
    )


def _diagnose_steps(steps: Sequence[Step], findings: Findings) -> tuple[Verdict, str]:
    """Return the verdict; if the probe lacked CPU, only what the server's gauges showed counts."""
    if findings.batches is False:
        return _with_sentence(Verdict.SERIALISING)
    if findings.ending is Ending.ERROR:
        return _with_sentence(Verdict.OVERLOADED)
    if rests_on_lack_of_cpu(steps):
        return Verdict.UNKNOWN, _lack_of_cpu(steps)
    last = with_throughput(steps)[-1]
    if (last.cache_use or 0.0) > THRESHOLDS.full_cache_share:
        return _with_sentence(Verdict.KV_BOUND)
    if (last.waiting or 0.0) >= THRESHOLDS.probe_waiting:
        return _with_sentence(Verdict.SATURATED)
    least = THRESHOLDS.probe_running_share * last.open
    held_up = last.running is not None and last.running < least
    grown = growth(steps, held_up=held_up)
    if grown is Growth.LEVEL:
        return _with_sentence(Verdict.FRONT_END_BOUND if held_up else Verdict.SATURATED)
    return _not_at_limit(grown, findings.ending)


def _not_at_limit(grown: Growth, ending: Ending) -> tuple[Verdict, str]:
    if ending in _FORBIDDEN:
        return Verdict.UNKNOWN, _FORBIDDEN[ending]
    if grown is Growth.GROWS and ending in _GROWING:
        return Verdict.STARVED, _GROWING[ending]
    return _with_sentence(Verdict.UNKNOWN)


def _with_sentence(verdict: Verdict) -> tuple[Verdict, str]:
    return verdict, _SENTENCES[verdict]


def _lack_of_cpu(steps: Sequence[Step]) -> str:
    able = in_flight_with_cpu(steps)
    valid = "" if able is None else f" The figures up to {able} in flight are valid."
    return (
        "This machine had too little CPU to send more, so what limits the server is not known: "
        f"probe it from a machine with more CPU.{valid}"
    )


def _fixed(choice: Choice, forks: int) -> dict[str, str]:
    """Return fixed settings for at least that number in flight: bulk documents times pages of each.

    They use no more documents than pages of each, so that a long document alone is fast too.
    """
    documents = min(max(1, forks - 1), math.isqrt(choice.in_flight))
    return {
        # One more fork, which is reserved for interactive documents.
        "OCR_WORKER_CONCURRENCY": str(documents + 1),
        "GLMOCR_PIPELINE_MAX_WORKERS": str(math.ceil(choice.in_flight / documents)),
    }


def _kind(findings: Findings) -> str:
    if findings.batches is None:
        return "It is not certain whether the server batches"
    return "The server batches" if findings.batches else "The server reads one page at a time"


def _slots(findings: Findings) -> str:
    if findings.slots is None:
        return "its slots are not known"
    slots = counted(findings.slots, "slot")
    source = "as the server reports" if findings.slots_stated else "beyond which requests waited"
    return f"{slots}, {source}"


def _outcome(choice: Choice) -> str:
    return (
        f"{choice.in_flight} in flight, {choice.pages_per_second:.3g} pages/s, 95 % of answers "
        f"within {choice.p95:.3g} s"
    )


def _assignments(environment: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in environment.items())
