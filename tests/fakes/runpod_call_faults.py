"""Named faults of calls to the fake RunPod service."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.loopback import Answer
from tests.fakes.ocr_server import Gate

Body = dict[str, Any]


@dataclass(frozen=True)
class CallFault:
    """The fault of one call. `accepted`: whether it takes effect; the rest changes its answer.

    `before` delays the call's effect until the gate opens, `after` delays its answer.
    """

    accepted: bool = True
    status: int | None = None
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    change: Callable[[Body], Body] | None = None
    before: Gate | None = None
    after: Gate | None = None
    delay: float = 0.0
    cut: str | None = None

    def applied(self, normal: Answer) -> Answer:
        """Return the changed answer."""
        body = normal.body if self.body is None else self.body
        if self.change is not None and normal.status == 200:
            body = json.dumps(self.change(json.loads(normal.body))).encode()
        status = normal.status if self.status is None else self.status
        return Answer(status, body, {**normal.headers, **self.headers}, self.cut)


NO_FAULT = CallFault()
# The call does not reach the service, or its answer does not reach the caller.
CUT_BEFORE = CallFault(accepted=False, cut="whole")
CUT_AFTER = CallFault(cut="whole")
HALF_AN_ANSWER = CallFault(cut="half")
HTML = CallFault(
    accepted=False, body=b"<!doctype html><title>Sign in</title>",
    headers={"Content-Type": "text/html"},
)  # fmt: skip
HTML_AFTER = CallFault(body=HTML.body, headers=HTML.headers)
TRUNCATED_JSON = CallFault(body=b'{"id": "0b7e", "status": "IN_QU')
NO_ID = CallFault(change=lambda body: {"status": body["status"]})


def refused(status: int, message: str = "no", retry_after: str | None = None) -> CallFault:
    """An error without any effect: 401, 404, 429 with Retry-After, 500, 502, 503, …"""
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    return CallFault(False, status, json.dumps({"error": message}).encode(), headers)


def failed_after(status: int) -> CallFault:
    """The call takes effect, but its answer is an error."""
    return CallFault(True, status, b"<html><body>upstream error</body></html>")


def says(status: str, **more: Any) -> CallFault:
    """/status reports this status instead of the true one: earlier, later or unknown."""
    return CallFault(change=lambda body: {"id": body["id"], "status": status, **more})


def says_failed(message: str, kind: str = "<class 'RuntimeError'>") -> CallFault:
    """FAILED with the JSON string to which the worker loop converts an exception."""
    error = {"error_type": kind, "error_message": message, "error_traceback": "Traceback …"}
    return says("FAILED", error=json.dumps(error))


NO_OUTPUT = says("COMPLETED", executionTime=1000, delayTime=10)


def without_pages(*pages: int) -> CallFault:
    """A result without these pages."""

    def change(body: Body) -> Body:
        output = body.get("output")
        if not isinstance(output, dict) or "pages" not in output:
            return body
        kept = [page for page in output["pages"] if page["page"] not in pages]
        return {**body, "output": {**output, "pages": kept}}

    return CallFault(change=change)


def with_output(output: Any) -> CallFault:
    """COMPLETED with this output."""
    return says("COMPLETED", output=output, delayTime=10, executionTime=1000)


def held(before: Gate | None = None, after: Gate | None = None) -> CallFault:
    """Delayed until a gate opens, before the effect or after it."""
    return CallFault(before=before, after=after)


def slow(seconds: float) -> CallFault:
    return CallFault(delay=seconds)
