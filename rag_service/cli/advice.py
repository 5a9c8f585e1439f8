"""What follows from a probe, in words and settings. Used by the command `probe`."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from rag_service.occupancy import Verdict
from rag_service.ocr.steps import Choice, Ending, Findings, Step

_FULL_CACHE = 0.9
# Where none waits, so much of what is open must be found running; the rest is in the front end.
_ARRIVED = 0.75
# One core does all of the probe's work but the drawing of pages.
_BUSY = 0.8

_SENTENCES = {
    Verdict.UNKNOWN: "Too little was measured to say what limits it.",
    Verdict.STARVED: "It could take more than was sent; probe further with a higher --most.",
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
        "It reads one page after the other: more in flight only adds latency. Use a server that "
        "batches (SGLang, vLLM), or let this one batch."
    ),
}  # fmt: skip
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
    """What limits the server, and the environment that suits each objective."""

    model_config = ConfigDict(frozen=True)

    verdict: Verdict
    sentence: str
    settings_for_throughput: dict[str, str]
    settings_for_latency: dict[str, str]
    error: str | None
    probe_was_busy: bool

    def lines(self, findings: Findings) -> list[str]:
        """All of it for people."""
        error = f": {self.error}" if self.error else ""
        lines = [
            f"{_kind(findings)}; {_slots(findings)}.",
            f"{self.verdict}: {self.sentence}",
            f"For throughput: {_outcome(findings.throughput)}.",
            f"    {_assignments(self.settings_for_throughput)}",
            f"For latency: {_outcome(findings.latency)}.",
            f"    {_assignments(self.settings_for_latency)}",
            "GLMOCR_PIPELINE_MAX_WORKERS=auto, the default, finds the number by itself for "
            "RAG_SERVICE_OCR_OBJECTIVE=throughput or latency.",
            f"Stopped since {_ENDINGS[findings.ending]}{error}.",
        ]
        if self.probe_was_busy:
            lines.append("The probe itself was at its limit: run it where there is more CPU.")
        return lines


def advise(steps: Sequence[Step], findings: Findings, forks: int) -> Advice:
    """`forks`: documents in flight, over which the requests are spread."""
    verdict = _verdict(steps, findings)
    return Advice(
        verdict=verdict,
        sentence=_SENTENCES[verdict],
        settings_for_throughput=_fixed(findings.throughput, forks),
        settings_for_latency=_fixed(findings.latency, forks),
        error=steps[-1].error,
        probe_was_busy=any(step.client_cpu > _BUSY for step in steps),
    )


def _verdict(steps: Sequence[Step], findings: Findings) -> Verdict:
    if findings.batches is False:
        return Verdict.SERIALISING
    if findings.ending is Ending.ERROR:
        return Verdict.OVERLOADED
    last = [step for step in steps if step.pages_per_second is not None][-1]
    if (last.cache_use or 0.0) > _FULL_CACHE:
        return Verdict.KV_BOUND
    if (last.waiting or 0.0) >= 1:
        return Verdict.SATURATED
    if findings.ending is Ending.MOST and findings.throughput.in_flight == last.in_flight:
        return Verdict.STARVED
    if findings.ending is not Ending.NO_GROWTH:
        return Verdict.UNKNOWN
    hidden = last.running is not None and last.running < _ARRIVED * last.open
    return Verdict.FRONT_END_BOUND if hidden else Verdict.SATURATED


def _fixed(choice: Choice, forks: int) -> dict[str, str]:
    """So many in flight as a fixed number: documents times pages of each."""
    documents = min(forks, choice.in_flight)
    pages = max(1, round(choice.in_flight / documents))
    return {
        "OCR_WORKER_CONCURRENCY": str(documents),
        "GLMOCR_PIPELINE_MAX_WORKERS": str(pages),
    }


def _kind(findings: Findings) -> str:
    if findings.batches is None:
        return "Whether it batches is not certain"
    return "The server batches" if findings.batches else "The server serialises"


def _slots(findings: Findings) -> str:
    if findings.slots is None:
        return "its slots are not known"
    slots = f"{findings.slots} slot" + ("s" if findings.slots != 1 else "")
    return f"{slots}, as it says" if findings.slots_stated else f"{slots}, where requests waited"


def _outcome(choice: Choice) -> str:
    return (
        f"{choice.in_flight} in flight, {choice.pages_per_second:.3g} pages/s, 95 % of answers "
        f"within {choice.p95:.3g} s"
    )


def _assignments(environment: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in environment.items())
