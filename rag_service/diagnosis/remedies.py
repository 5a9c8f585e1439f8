"""What each verdict means and what to do about it, in sentences for live samples and probes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Remedy:
    """A clause that says what limits the server (no full stop), and a sentence that says what
    to do.
    """

    meaning: str
    action: str

    def __str__(self) -> str:
        return f"{self.meaning[0].upper()}{self.meaning[1:]}. {self.action}"


ONLY_LATENCY = "More requests in flight only add latency."

FRONT_END_BOUND = Remedy(
    "the server's front end, which decodes the images, is the limit",
    "Start the server with more API processes (vLLM: --api-server-count), or send smaller images "
    "(ocr.dpi).",
)
KV_BOUND = Remedy(
    "the server's KV cache is full, so no more requests fit",
    "Give the server more memory (vLLM: --gpu-memory-utilization, SGLang: --mem-fraction-static) "
    "or a shorter context, or send smaller images (ocr.dpi).",
)
SATURATED = Remedy(
    "the server is working at its limit",
    "For more pages, send smaller images (ocr.dpi), or use a faster GPU or another server.",
)
SERIALISING = Remedy(
    "the server reads one page at a time",
    "For more pages, let the server batch (vLLM: --max-num-seqs, SGLang: --max-running-requests), "
    "or use a server that batches.",
)
AUTO = "set GLMOCR_PIPELINE_MAX_WORKERS to `auto`"
