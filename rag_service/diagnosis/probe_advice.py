"""What follows from a probe, in words and settings. Used by the command `probe`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from rag_service.diagnosis.bottleneck import Verdict
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

_FULL_CACHE = 0.9
# Where none waits, so much of what is open must be found running; the rest is in the front end.
_ARRIVED = 0.75

_SENTENCES = {
    Verdict.UNKNOWN: (
        "Too little was measured to say what limits it; let the probe go further, or last longer "
        "(--seconds)."
    ),
    Verdict.FRONT_END_BOUND: (
        "Requests are open but neither run nor wait: the server's front end, which decodes the "
        "pictures, is the limit. More in flight only adds latency. Give it more API processes "
        "(vLLM: --api-server-count) or smaller pictures (ocr.dpi)."
    ),
    Verdict.KV_BOUND: (
        "Its KV cache is full: more in flight brings nothing. Give it more memory, a shorter "
        "context, or smaller pictures (ocr.dpi)."
    ),
    Verdict.SATURATED: (
        "It is full: more in flight only adds latency. More pages an hour need smaller pictures "
        "(ocr.dpi), a faster GPU or another server."
    ),
    Verdict.OVERLOADED: "It failed under the last load; keep to what is said here.",
    Verdict.SERIALISING: (
        "It reads one page after the other: more in flight only adds latency. More pages an hour "
        "need a server that batches, as SGLang and vLLM do on a GPU. If it is one of these, let it "
        "run more at once (vLLM: --max-num-seqs, SGLang: --max-running-requests)."
    ),
}
# Where throughput still grew at the end.
_GROWING = {
    Ending.MOST: "It could take more than was sent; probe further with a higher --most.",
    Ending.INTERRUPTED: "It could take more than was sent; let the probe run to its end.",
}
# Where nothing is known of more in flight, since the probe was not to try it.
_FORBIDDEN = {
    Ending.LATENCY: (
        "More in flight may bring more pages, but answers already take longer than --max-latency; "
        "raise it to know."
    ),
    Ending.TIMEOUT: (
        "More in flight may bring more pages, but answers could then take longer than "
        "ocr.read_timeout; raise it to know."
    ),
}
_ENDINGS = {
    Ending.SERIALISES: "more in flight brought no more",
    Ending.NO_GROWTH: "two doublings brought less than 5 % more",
    Ending.LATENCY: "answers took longer than --max-latency",
    Ending.TIMEOUT: "twice as many could have passed ocr.read_timeout",
    Ending.ERROR: "a request failed",
    Ending.MOST: "--most was reached",
    Ending.INTERRUPTED: "it was interrupted",
}


class Advice(BaseModel):
    """What limits the server, and the environment that suits each objective.

    `empty_answers`: of `all_answers`, those without a word.
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
        """All of it for people."""
        error = f": {self.error}" if self.error else ""
        return [
            *self._warnings(),
            f"{_kind(findings)}; {_slots(findings)}.",
            f"{self.verdict}: {self.sentence}",
            f"For throughput: {_outcome(findings.throughput)}.",
            f"    {_assignments(self.settings_for_throughput)}",
            f"For latency: {_outcome(findings.latency)}.",
            f"    {_assignments(self.settings_for_latency)}",
            "Of these forks (OCR_WORKER_CONCURRENCY) one is kept for interactive documents.",
            "GLMOCR_PIPELINE_MAX_WORKERS=auto, the default, finds the number by itself for "
            "RAG_SERVICE_OCR_OBJECTIVE=throughput or latency.",
            f"Stopped since {_ENDINGS[findings.ending]}{error}.",
        ]

    def _warnings(self) -> list[str]:
        warnings = []
        if self.empty_answers:
            warnings.append(
                f"Warning: {self.empty_answers} of {self.all_answers} answers were empty, though "
                "every page is full of text. This may be no OCR model, or not the right one: name "
                "another with --model; or the pages are too small to be read: raise --dpi."
            )
        # Where nothing is known, the verdict's sentence says it.
        if self.probe_was_busy and self.verdict is not Verdict.UNKNOWN:
            warnings.append(
                "Warning: the probe itself was at its limit; run it where there is more CPU."
            )
        return warnings


def advise(steps: Sequence[Step], findings: Findings, forks: int) -> Advice:
    """`forks`: those of the ocr worker, over which the requests are spread."""
    verdict, sentence = _verdict(steps, findings)
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


def _verdict(steps: Sequence[Step], findings: Findings) -> tuple[Verdict, str]:
    """What the server itself showed comes first; then nothing is said against it without CPU."""
    if findings.batches is False:
        return _said(Verdict.SERIALISING)
    if findings.ending is Ending.ERROR:
        return _said(Verdict.OVERLOADED)
    if rests_on_lack_of_cpu(steps):
        return Verdict.UNKNOWN, _of_this_machine(steps)
    last = with_throughput(steps)[-1]
    if (last.cache_use or 0.0) > _FULL_CACHE:
        return _said(Verdict.KV_BOUND)
    if (last.waiting or 0.0) >= 1:
        return _said(Verdict.SATURATED)
    held_up = last.running is not None and last.running < _ARRIVED * last.open
    grown = growth(steps, held_up=held_up)
    if grown is Growth.LEVEL:
        return _said(Verdict.FRONT_END_BOUND if held_up else Verdict.SATURATED)
    return _of_what_is_missing(grown, findings.ending)


def _of_what_is_missing(grown: Growth, ending: Ending) -> tuple[Verdict, str]:
    if ending in _FORBIDDEN:
        return Verdict.UNKNOWN, _FORBIDDEN[ending]
    if grown is Growth.GROWS and ending in _GROWING:
        return Verdict.STARVED, _GROWING[ending]
    return _said(Verdict.UNKNOWN)


def _said(verdict: Verdict) -> tuple[Verdict, str]:
    return verdict, _SENTENCES[verdict]


def _of_this_machine(steps: Sequence[Step]) -> str:
    able = in_flight_with_cpu(steps)
    still = "" if able is None else f" The figures up to {able} in flight are true all the same."
    return (
        "This machine had no CPU to send more, so what limits the server is not known: probe it "
        f"from a machine with more CPU.{still}"
    )


def _fixed(choice: Choice, forks: int) -> dict[str, str]:
    """So many in flight as a fixed number, at least: bulk documents times pages of each.

    No more documents than pages, so that a long one alone is quick too.
    """
    documents = min(max(1, forks - 1), math.isqrt(choice.in_flight))
    return {
        # One more, which is kept for interactive documents.
        "OCR_WORKER_CONCURRENCY": str(documents + 1),
        "GLMOCR_PIPELINE_MAX_WORKERS": str(math.ceil(choice.in_flight / documents)),
    }


def _kind(findings: Findings) -> str:
    if findings.batches is None:
        return "Whether it batches is not certain"
    return "The server batches" if findings.batches else "The server serialises"


def _slots(findings: Findings) -> str:
    if findings.slots is None:
        return "its slots are not known"
    slots = counted(findings.slots, "slot")
    return f"{slots}, as it says" if findings.slots_stated else f"{slots}, where requests waited"


def _outcome(choice: Choice) -> str:
    return (
        f"{choice.in_flight} in flight, {choice.pages_per_second:.3g} pages/s, 95 % of answers "
        f"within {choice.p95:.3g} s"
    )


def _assignments(environment: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in environment.items())
