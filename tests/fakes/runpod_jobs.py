"""RunPod's job table as its documentation describes it: queue, workers, ttl, retention, endings.

All methods may be called from any thread. Times are monotonic seconds.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

FINAL = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMED_OUT"})
_DEFAULT_TTL = 86_400_000
_DEFAULT_EXECUTION = 600_000


@dataclass
class Job:
    """One job; `takes` names every worker that received it, in order."""

    id: str
    input: dict[str, Any]
    policy: dict[str, Any]
    webhook: str | None
    submitted: float
    status: str = "IN_QUEUE"
    takes: list[str] = field(default_factory=list)
    started: float | None = None
    ended: float | None = None
    output: Any = None
    error: Any = None
    progress: list[Any] = field(default_factory=list)

    @property
    def final(self) -> bool:
        return self.status in FINAL

    @property
    def worker(self) -> str | None:
        """The worker that works on it."""
        return self.takes[-1] if self.status == "IN_PROGRESS" and self.takes else None

    @property
    def key(self) -> str:
        """The request key in the input; empty if there is none."""
        return str(self.input.get("request_key", ""))

    @property
    def pages(self) -> list[int]:
        return list(self.input.get("pages", []))

    def view(self) -> dict[str, Any]:
        """The body of /status and of the webhook; times in milliseconds."""
        body: dict[str, Any] = {"id": self.id, "status": self.status}
        if self.started is not None:
            body["delayTime"] = _ms(self.started - self.submitted)
            if self.ended is not None:
                body["executionTime"] = _ms(self.ended - self.started)
        if self.output is not None:
            body["output"] = self.output
        elif self.status == "IN_PROGRESS" and self.progress:
            body["output"] = self.progress[-1]
        if self.error is not None:
            body["error"] = self.error
        return body


@dataclass
class Worker:
    """A worker that has asked for work."""

    id: str
    first_seen: float
    last_seen: float


class JobTable:
    """Jobs and workers of one endpoint. Change the plain attributes before or between jobs."""

    def __init__(self, on_final: Callable[[Job], None]) -> None:
        self.retention = 1800.0
        self.cold_start = 0.0
        # Seconds without a request from a worker until its job counts as lost.
        self.silent_after = 60.0
        # How often a job of a lost worker goes back to the queue before it is TIMED_OUT.
        self.requeues = 1
        self.jobs: dict[str, Job] = {}
        self.workers: dict[str, Worker] = {}
        # The most jobs of one request key that were live at once.
        self.most_alive: dict[str, int] = defaultdict(int)
        self._on_final = on_final
        self._stops: dict[str, list[str]] = defaultdict(list)
        self._lock = threading.RLock()

    # Calls of the API's clients.

    def add(self, body: dict[str, Any]) -> Job:
        with self._lock:
            job = Job(
                id=f"{uuid.uuid4()}-t1",
                input=body["input"],
                policy=body.get("policy") or {},
                webhook=body.get("webhook"),
                submitted=time.monotonic(),
            )
            self.jobs[job.id] = job
            alive = sum(not other.final for other in self.jobs.values() if other.key == job.key)
            self.most_alive[job.key] = max(self.most_alive[job.key], alive)
            return job

    def get(self, job_id: str) -> Job | None:
        """Return the job; None if it is unknown, past its ttl, or final and past retention."""
        with self._lock:
            self.tick()
            return self.jobs.get(job_id)

    def cancel(self, job_id: str) -> Job | None:
        with self._lock:
            job = self.get(job_id)
            if job is not None and not job.final:
                self._stop(job)
                self._end(job, "CANCELLED")
            return job

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the body of /health."""
        with self._lock:
            self.tick()
            by_status = defaultdict(int)
            for job in self.jobs.values():
                by_status[job.status] += 1
            return {"jobs": self._job_counts(by_status), "workers": self._worker_counts()}

    # Calls of workers.

    def take(self, worker_id: str) -> Job | None:
        """Give the oldest queued job to this worker if it is warm."""
        with self._lock:
            worker = self.seen(worker_id)
            self.tick()
            if time.monotonic() - worker.first_seen < self.cold_start:
                return None
            job = next((job for job in self.jobs.values() if job.status == "IN_QUEUE"), None)
            if job is not None:
                job.status, job.started, job.ended = "IN_PROGRESS", time.monotonic(), None
                job.takes.append(worker_id)
            return job

    def done(self, worker_id: str, job_id: str, body: dict[str, Any]) -> None:
        """Take a result or progress from a worker; ignore it if the worker no longer has the job.

        Progress after the result overwrites the job, as reported in runpod-python#250.
        """
        with self._lock:
            self.seen(worker_id)
            job = self.jobs.get(job_id)
            if job is None or not job.takes or job.takes[-1] != worker_id:
                return
            if body.get("status") == "IN_PROGRESS":
                job.progress.append(body.get("output"))
                if job.status == "COMPLETED":
                    job.status, job.output = "IN_PROGRESS", None
            elif not job.final:
                job.output, job.error = body.get("output"), body.get("error")
                self._end(job, "FAILED" if job.error is not None else "COMPLETED")

    def result_refused(self, worker_id: str, job_id: str) -> None:
        """Refuse a result that is too large: COMPLETED without output (runpod-python#309)."""
        self.done(worker_id, job_id, {})

    def stops(self, worker_id: str) -> list[str]:
        """Return the jobs that this worker must stop, each once."""
        with self._lock:
            self.seen(worker_id)
            return self._stops.pop(worker_id, [])

    def seen(self, worker_id: str) -> Worker:
        with self._lock:
            now = time.monotonic()
            worker = self.workers.setdefault(worker_id, Worker(worker_id, now, now))
            worker.last_seen = now
            return worker

    # Events outside the API.

    def gone(self, worker_id: str) -> None:
        """End the worker's container: its job is queued again or ends as TIMED_OUT."""
        with self._lock:
            self.workers.pop(worker_id, None)
            for job in self._running_on(worker_id):
                if len(job.takes) <= self.requeues:
                    job.status = "IN_QUEUE"
                else:
                    self._end(job, "TIMED_OUT")

    def finish(self, job_id: str, status: str, *, output: Any = None, error: Any = None) -> None:
        """End a job as RunPod or another client would; its worker gets a stop."""
        with self._lock:
            job = self.jobs[job_id]
            self._stop(job)
            job.output, job.error = output, error
            self._end(job, status)

    def lose(self, job_id: str) -> None:
        """Forget a job, as at the end of its ttl: /status then answers 404."""
        with self._lock:
            job = self.jobs.pop(job_id)
            self._stop(job)

    def tick(self) -> None:
        """Apply the time limits: ttl, retention, execution time-outs, lost workers."""
        with self._lock:
            now = time.monotonic()
            for worker in list(self.workers.values()):
                if now - worker.last_seen > self.silent_after:
                    self.gone(worker.id)
            for job in list(self.jobs.values()):
                self._age(job, now)

    def _age(self, job: Job, now: float) -> None:
        kept = job.final and job.ended is not None and now - job.ended <= self.retention
        if job.final:
            if not kept:
                del self.jobs[job.id]
        elif now - job.submitted > job.policy.get("ttl", _DEFAULT_TTL) / 1000:
            self.lose(job.id)
        elif job.status == "IN_PROGRESS" and job.ended is None and job.started is not None:
            limit = job.policy.get("executionTimeout", _DEFAULT_EXECUTION) / 1000
            if now - job.started > limit:
                self._stop(job)
                self._end(job, "TIMED_OUT")

    def _running_on(self, worker_id: str) -> Iterator[Job]:
        for job in list(self.jobs.values()):
            if job.worker == worker_id and job.ended is None:
                yield job

    def _stop(self, job: Job) -> None:
        if job.worker is not None:
            self._stops[job.worker].append(job.id)

    def _end(self, job: Job, status: str) -> None:
        job.status, job.ended = status, time.monotonic()
        if job.started is None:
            job.started = job.ended
        self._on_final(job)

    def _job_counts(self, by_status: dict[str, int]) -> dict[str, int]:
        return {
            "completed": by_status["COMPLETED"],
            "failed": by_status["FAILED"] + by_status["TIMED_OUT"],
            "inProgress": by_status["IN_PROGRESS"],
            "inQueue": by_status["IN_QUEUE"],
            "retried": sum(max(0, len(job.takes) - 1) for job in self.jobs.values()),
        }

    def _worker_counts(self) -> dict[str, int]:
        now = time.monotonic()
        busy = {job.worker for job in self.jobs.values()}
        cold = [w for w in self.workers.values() if now - w.first_seen < self.cold_start]
        running = [w for w in self.workers.values() if w.id in busy]
        idle = len(self.workers) - len(cold) - len(running)
        return {
            "idle": idle, "running": len(running), "initializing": len(cold),
            "ready": idle + len(running), "throttled": 0,
        }  # fmt: skip


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
