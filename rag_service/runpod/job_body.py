"""The JSON body of POST /run, whose size is known before it is made."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rag_service.runpod.job_format import InlineDocument, JobInput, JobOptions
from rag_service.states import LayoutMode

Encoding = Literal["base64", "zip+base64"]
# Quotes inside JSON strings are escaped, so this occurs only at the place of the document.
_PLACE = '"data":""'


@dataclass(frozen=True, slots=True)
class Envelope:
    """A job without its document; times in milliseconds."""

    request_key: str
    dpi: int
    layout: LayoutMode
    max_tokens: int
    execution_timeout_ms: int
    ttl_ms: int
    webhook: str | None


@dataclass(frozen=True, slots=True)
class JobBody:
    """The parts of a body before and after its document."""

    head: bytes
    tail: bytes

    def size(self, document_bytes: int) -> int:
        """Return the bytes of the body with a document of this size in base64."""
        return len(self.head) + 4 * math.ceil(document_bytes / 3) + len(self.tail)

    def fill(self, document: bytes) -> bytes:
        """Return the whole body."""
        return b"".join((self.head, base64.b64encode(document), self.tail))


def job_body(
    envelope: Envelope, filename: str, pages: Sequence[int], encoding: Encoding
) -> JobBody:
    """Return the body of a job for these original pages, with its policy and webhook."""
    job = JobInput(
        request_key=envelope.request_key,
        filename=filename,
        document=InlineDocument(encoding=encoding, data=""),
        pages=list(pages),
        options=JobOptions(
            dpi=envelope.dpi, layout=envelope.layout, max_tokens=envelope.max_tokens
        ),
    )
    body: dict[str, Any] = {
        "input": job.model_dump(),
        "policy": {"executionTimeout": envelope.execution_timeout_ms, "ttl": envelope.ttl_ms},
    }
    if envelope.webhook is not None:
        body["webhook"] = envelope.webhook
    head, place, tail = json.dumps(body, separators=(",", ":")).partition(_PLACE)
    return JobBody((head + place[:-1]).encode(), (place[-1:] + tail).encode())
