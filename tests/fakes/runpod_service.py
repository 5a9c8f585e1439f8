"""A fake RunPod: the public API of one endpoint and the API that real worker loops poll.

It has RunPod's semantics (tests.fakes.runpod_jobs) and the faults that a test asks for
(runpod_call_faults). Every call is recorded. All methods may be called from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tests.fakes.loopback import Answer, Loopback, Request
from tests.fakes.ocr_server import Gate
from tests.fakes.runpod_call_faults import NO_FAULT, CallFault
from tests.fakes.runpod_jobs import Job, JobTable

ENDPOINT, KEY = "ep-test", "rp-test-key"
MAX_BODY = 10_000_000
PUBLIC = frozenset({"run", "status", "cancel", "health"})
_POLL = 0.03

Player = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass
class Call:
    """One call; `status` is the HTTP status of its answer, None if there was none."""

    name: str
    at: float
    job_id: str | None
    key: str = ""
    fault: CallFault = NO_FAULT
    status: int | None = None


class RunPodService:
    """Use as a context manager; clients get `base_url` and `endpoint`."""

    def __init__(self, *, endpoint: str = ENDPOINT, key: str = KEY) -> None:
        self.endpoint, self.key = endpoint, key
        self.max_body = MAX_BODY
        self.too_large_status = 413
        # Seconds between a webhook's post and each of its two repeats.
        self.webhook_wait = 10.0
        # Seconds that a worker's poll is held open.
        self.hold = 2.0
        # Called first for each call, in the server's thread; a fault that it returns has
        # precedence over all others.
        self.on_call: Callable[[Call], CallFault | None] = lambda _: None
        self.calls: list[Call] = []
        self.webhooks: list[tuple[str, int | None]] = []
        self.table = JobTable(self._final)
        self._next: dict[str, deque[CallFault]] = {}
        self._always: dict[str, CallFault] = {}
        self._lock = threading.RLock()
        self._server = Loopback(self._answer)

    def __enter__(self) -> RunPodService:
        self._server.__enter__()
        self._server.start(self._keep_time())
        return self

    def __exit__(self, *_: object) -> None:
        self._server.__exit__()

    @property
    def base_url(self) -> str:
        return f"{self._server.url}/v2"

    @property
    def worker_variables(self) -> dict[str, str]:
        """The variables that RunPod sets for a worker, without the worker's own id."""
        api = f"{self.base_url}/{self.endpoint}"
        return {
            "RUNPOD_WEBHOOK_GET_JOB": f"{api}/job-take/$ID?gpu=test",
            "RUNPOD_WEBHOOK_POST_OUTPUT": f"{api}/job-done/$RUNPOD_POD_ID/$ID?gpu=test",
            "RUNPOD_WEBHOOK_POST_STREAM": f"{api}/job-stream/$RUNPOD_POD_ID/$ID?gpu=test",
            "RUNPOD_WEBHOOK_PING": f"{api}/ping/$RUNPOD_POD_ID?gpu=test",
            "RUNPOD_AI_API_KEY": self.key,
            "RUNPOD_ENDPOINT_ID": self.endpoint,
        }

    # Behaviour.

    def next(self, call: str, *faults: CallFault) -> None:
        """Set faults for the next calls of this name (run, status, cancel, health, job-done, …)."""
        with self._lock:
            self._next.setdefault(call, deque()).extend(faults)

    def always(self, call: str, fault: CallFault) -> None:
        """Set the fault of every call of this name after those of next(); NO_FAULT removes it."""
        with self._lock:
            self._always[call] = fault

    def refuse(self) -> None:
        """Cut all connections; new ones are refused until listen()."""
        self._server.refuse()

    def listen(self) -> None:
        self._server.listen()

    def play(self, player: Player, *, workers: int = 1, seconds: float = 0.0) -> None:
        """Start workers without processes: each answers a job with `player` of its input.

        An exception of the player fails the job, as in the real worker loop.
        """
        for number in range(workers):
            self._server.start(self._play(f"player-{number}", player, seconds))

    # Records.

    @property
    def jobs(self) -> list[Job]:
        """The jobs that are not forgotten, oldest first."""
        return list(self.table.jobs.values())

    def job(self, remote_id: str) -> Job:
        return self.table.jobs[remote_id]

    def count(self, call: str) -> int:
        with self._lock:
            return sum(one.name == call for one in self.calls)

    @property
    def accepted(self) -> Counter[str]:
        """The number of jobs made by posts, by request key."""
        with self._lock:
            made = [one for one in self.calls if one.name == "run" and one.job_id]
            return Counter(one.key for one in made)

    @property
    def posts(self) -> Counter[str]:
        """The number of posts received, accepted or not, by request key."""
        with self._lock:
            return Counter(one.key for one in self.calls if one.name == "run")

    # Implementation.

    async def _answer(self, request: Request) -> Answer:
        name, rest = self._split(request.path)
        call = Call(name, time.monotonic(), rest[-1] if rest else None)
        if name == "run":
            call.job_id, call.key = None, _key(request.body)
        with self._lock:
            self.calls.append(call)
        call.fault = fault = self._fault_of(call)
        await _until(fault.before, fault.delay)
        normal = await self._normal_answer(call, rest, request) if fault.accepted else Answer()
        await _until(fault.after)
        answer = fault.applied(normal)
        call.status = None if answer.cut == "whole" else answer.status
        return answer

    def _split(self, path: str) -> tuple[str, list[str]]:
        """Return the call's name and the rest of its path; "" for another endpoint."""
        start = f"/v2/{self.endpoint}/"
        if not path.startswith(start):
            return "", []
        name, *rest = path.removeprefix(start).split("/")
        return name, rest

    def _fault_of(self, call: Call) -> CallFault:
        chosen = self.on_call(call)
        if chosen is not None:
            return chosen
        with self._lock:
            waiting = self._next.get(call.name)
            return waiting.popleft() if waiting else self._always.get(call.name, NO_FAULT)

    async def _normal_answer(self, call: Call, rest: list[str], request: Request) -> Answer:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key != self.key:
            return Answer.json({"error": "unauthorized"}, 401)
        if call.name == "run" and request.method == "POST":
            return self._run(call, request)
        if call.name == "health":
            return Answer.json(self.table.counts())
        if call.name in {"status", "cancel"} and len(rest) == 1:
            act = self.table.get if call.name == "status" else self.table.cancel
            job = act(rest[0])
            missing = Answer.json({"error": "job not found"}, 404)
            return missing if job is None else Answer.json(job.view())
        return await self._worker_call(call.name, rest, request)

    def _run(self, call: Call, request: Request) -> Answer:
        if len(request.body) > self.max_body:
            return Answer.json({"error": "body too large"}, self.too_large_status)
        try:
            body = json.loads(request.body)
        except ValueError:
            return Answer.json({"error": "not JSON"}, 400)
        if not isinstance(body.get("input"), dict):
            return Answer.json({"error": "input is missing"}, 400)
        job = self.table.add(body)
        call.job_id = job.id
        return Answer.json({"id": job.id, "status": job.status})

    async def _worker_call(self, name: str, rest: list[str], request: Request) -> Answer:
        if name == "job-take":
            return await self._take(rest[0], request)
        if name == "job-stop":
            return await self._stop(rest[0], request)
        if name == "job-done":
            return self._done(rest[0], rest[1], request)
        if name == "ping":
            self.table.seen(rest[0])
            return Answer.json({})
        return Answer.json({"error": "no such call"}, 404)

    async def _take(self, worker: str, request: Request) -> Answer:
        deadline = time.monotonic() + self.hold
        while not request.gone.done():
            if job := self.table.take(worker):
                return Answer.json({"id": job.id, "input": job.input, "webhook": job.webhook})
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(_POLL)
        return Answer(204)

    async def _stop(self, worker: str, request: Request) -> Answer:
        deadline = time.monotonic() + self.hold
        while not request.gone.done():
            if jobs := self.table.stops(worker):
                return Answer.json({"jobsToStop": jobs})
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(_POLL)
        return Answer(204)

    def _done(self, worker: str, job_id: str, request: Request) -> Answer:
        if len(request.body) > self.max_body:
            self.table.result_refused(worker, job_id)
            return Answer.json({"error": "output too large"}, 400)
        self.table.done(worker, job_id, json.loads(request.body))
        return Answer.json({})

    async def _play(self, worker: str, player: Player, seconds: float) -> None:
        while True:
            job = self.table.take(worker)
            if job is not None:
                await asyncio.sleep(seconds)
                self.table.done(worker, job.id, await asyncio.to_thread(_played, player, job))
            await asyncio.sleep(_POLL)

    async def _keep_time(self) -> None:
        while True:
            self.table.tick()
            await asyncio.sleep(_POLL)

    def _final(self, job: Job) -> None:
        if job.webhook:
            self._server.start(self._call_webhook(job.webhook, job.view()))

    async def _call_webhook(self, url: str, body: Mapping[str, Any]) -> None:
        """Call once and, without a 200, twice more."""
        async with httpx.AsyncClient(timeout=10) as client:
            for attempt in range(3):
                if attempt:
                    await asyncio.sleep(self.webhook_wait)
                status = None
                with contextlib.suppress(httpx.HTTPError):
                    status = (await client.post(url, json=body)).status_code
                self.webhooks.append((str(body["id"]), status))
                if status == httpx.codes.OK:
                    return


def read_all(job_input: dict[str, Any]) -> dict[str, Any]:
    """Return a correct output: every page read, with the text `Page 3.`"""
    pages = [
        {
            "page": page, "markdown": f"Page {page}.", "regions": [], "finish_reason": "stop",
            "tokens": {"prompt": 100, "completion": 5}, "seconds": 0.1, "error": None,
        }
        for page in job_input["pages"]
    ]  # fmt: skip
    return {
        "version": 1, "request_key": job_input["request_key"], "pages": pages,
        "remaining_pages": [], "engine": {"name": "sglang", "model": "glm-ocr", "version": None},
        "gauges": None, "timings": {}, "debug": [],
    }  # fmt: skip


def _played(player: Player, job: Job) -> dict[str, Any]:
    try:
        output = dict(player(job.input))
    except Exception as error:
        kind = str(type(error))
        return {"error": json.dumps({"error_type": kind, "error_message": str(error)})}
    failure = output.pop("error", None)
    return {"output": output} if failure is None else {"output": output, "error": failure}


def _key(body: bytes) -> str:
    try:
        return str(json.loads(body)["input"]["request_key"])
    except (ValueError, KeyError, TypeError):
        return ""


async def _until(gate: Gate | None, delay: float = 0.0) -> None:
    await asyncio.sleep(delay)
    if gate is not None:
        gate.arrived.set()
        while not gate.is_open:
            await asyncio.sleep(0.01)
