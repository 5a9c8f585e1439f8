"""Every fault between the service and RunPod, with the record in which it must end.

One service works on all documents at the same time; each fault belongs to one document.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from rag_service.config.loader import load_settings
from tests.fakes import runpod_call_faults as call_faults
from tests.fakes.runpod_call_faults import NO_FAULT, CallFault, failed_after, refused, says, slow
from tests.fakes.runpod_service import Call, read_all
from tests.remote import QUICK_JOBS, Post, Remote, open_remote

RESULTS = Path(__file__).parents[2] / "benchmarks/results/runpod_faults.json"
REQUEST_TIMEOUT = float(QUICK_JOBS["RAG_SERVICE_RUNPOD_REQUEST_TIMEOUT"])
RUNPOD = load_settings().runpod
OLD = RUNPOD.visible_after + 10
NEAR_ITS_TTL = RUNPOD.ttl - RUNPOD.deadline_margin + 5
PAST_ITS_TTL = RUNPOD.ttl + 5
LONG_GONE = RUNPOD.ttl + RUNPOD.deadline_margin + 5
SECOND, LOST, EXPIRED = "second_try", "lost_answer", "expired"
DONE = ("first", "completed")

JobInput = dict[str, Any]


@dataclass
class Asked:
    """A call of status or cancel: the number of the document's job and of the call."""

    remote: Remote
    remote_id: str
    job: int
    times: int

    def pass_time(self, seconds: float) -> None:
        """Make the job older, at the first call only."""
        if self.times == 1:
            self.remote.pass_time(seconds, remote_id=self.remote_id)

    def keep_at_work(self) -> None:
        """Report the job as running, whatever the handler has done."""
        job = self.remote.runpod.job(self.remote_id)
        if job.status == "COMPLETED":
            job.status, job.output, job.ended = "IN_PROGRESS", None, None

    def lose(self) -> None:
        """Make RunPod forget the job."""
        if self.remote_id in self.remote.runpod.table.jobs:
            self.remote.runpod.table.lose(self.remote_id)


Answer = Callable[[Asked], CallFault]


def normal(_: Asked) -> CallFault:
    return NO_FAULT


def always(fault: CallFault) -> Answer:
    return lambda _: fault


def first(*several: CallFault) -> Answer:
    """Return these for the first calls of the first job, and normal answers after them."""
    return lambda asked: (
        several[asked.times - 1] if asked.job == 1 and asked.times <= len(several) else NO_FAULT
    )


def first_job(fault: CallFault) -> Answer:
    return lambda asked: fault if asked.job == 1 else NO_FAULT


@dataclass
class Case:
    """A fault and the record in which it must end. `answer` is RunPod's worker: (post, input)."""

    name: str
    posts: tuple[CallFault, ...] = ()
    status: Answer = normal
    cancel: Answer = normal
    answer: Callable[[int, JobInput], dict[str, Any]] = lambda _, given: read_all(given)
    pages: int = 1
    # Expected.
    error: str | None = None
    rows: tuple[tuple[str, str], ...] = (DONE,)
    accepted: int = 1
    says: str = ""
    cancelled: bool = False
    # The handler does not end its job.
    stuck: bool = False
    # Found while it runs.
    document_id: str = ""
    posted: int = 0
    answered: int = 0
    jobs: list[str] = field(default_factory=list)
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)


def lost_post(name: str, fault: CallFault, accepted: int) -> Case:
    """A lost answer to a post: the pages are posted again later, with the same key."""
    rows = (("first", "repeated"), (LOST, "completed"))
    return Case(f"run: {name}", (fault,), rows=rows, accepted=accepted)


def refused_post(status: int) -> Case:
    rows = (("first", "refused"),)
    return Case(
        f"run: {status}", (refused(status, "we do not like it"),), rows=rows, accepted=0,
        error="payload_too_large", says="we do not like it",
    )  # fmt: skip


def passing(name: str, *several: CallFault) -> Case:
    """A poll without a usable answer, while the job goes on."""
    return Case(f"status: {name}", status=first(*several))


def posted_again(name: str, outcome: str, reason: str, **more: Any) -> Case:
    more_rows = more.pop("more_rows", ())
    rows = (("first", outcome), (reason, "completed"), *more_rows)
    return Case(name, rows=rows, accepted=len(rows), **more)


def given_up(name: str, outcome: str, reason: str, error: str, **more: Any) -> Case:
    rows = (("first", outcome), (reason, outcome))
    return Case(name, rows=rows, accepted=2, error=error, **more)


def timed_out(name: str, **more: Any) -> Case:
    """The deadline: the job is cancelled, that is confirmed, and nothing is posted again."""
    rows = (("first", "timed_out"),)
    return Case(name, rows=rows, error="remote_job_timed_out", cancelled=True, stuck=True, **more)


def aged(seconds: float, then: CallFault = NO_FAULT, *, lost: bool = False) -> Answer:
    """Make the first job older by these seconds and, if `lost`, unknown to RunPod."""

    def answer(asked: Asked) -> CallFault:
        if asked.job > 1:
            return NO_FAULT
        asked.pass_time(seconds)
        if lost:
            asked.lose()
        return then

    return answer


def all_lost(seconds: float) -> Answer:
    def answer(asked: Asked) -> CallFault:
        asked.pass_time(seconds)
        asked.lose()
        return NO_FAULT

    return answer


def for_ever(word: str, **more: Any) -> Answer:
    """The status never changes until the deadline is near."""

    def answer(asked: Asked) -> CallFault:
        asked.pass_time(NEAR_ITS_TTL)
        sent = [call for call in asked.remote.runpod.calls if call.name == "cancel"]
        accepted = [call for call in sent if call.job_id == asked.remote_id and call.status == 200]
        return NO_FAULT if accepted else says(word, **more)

    return answer


def never_ends(asked: Asked) -> CallFault:
    """Not even the cancel changes the status."""
    asked.pass_time(NEAR_ITS_TTL)
    return says("IN_PROGRESS", executionTime=1000)


def cancel_does_nothing(asked: Asked) -> CallFault:
    asked.pass_time(LONG_GONE - NEAR_ITS_TTL)
    return NO_FAULT


def fails(message: str) -> Callable[[int, JobInput], dict[str, Any]]:
    def answer(_: int, given: JobInput) -> dict[str, Any]:
        raise RuntimeError(message)

    return answer


def fails_once(post: int, given: JobInput) -> dict[str, Any]:
    if post == 1:
        raise RuntimeError("CUDA out of memory")
    return read_all(given)


def without_page_2(post: int, given: JobInput) -> dict[str, Any]:
    output = read_all(given)
    if post == 1:
        output["pages"] = [page for page in output["pages"] if page["page"] != 2]
    return output


def one_page_each(_: int, given: JobInput) -> dict[str, Any]:
    output = read_all(given)
    output["pages"], output["remaining_pages"] = output["pages"][:1], given["pages"][1:]
    return output


def nothing_but_remains(_: int, given: JobInput) -> dict[str, Any]:
    return {**read_all(given), "pages": [], "remaining_pages": given["pages"]}


def pages_of_another_job(_: int, given: JobInput) -> dict[str, Any]:
    strange = [{"page": 99, "markdown": "Strange."}]
    return {**read_all(given), "pages": strange, "remaining_pages": given["pages"]}


def another_key(_: int, given: JobInput) -> dict[str, Any]:
    return {**read_all(given), "request_key": "another"}


def page_error(code: str, *, once: bool = False) -> Callable[[int, JobInput], dict[str, Any]]:
    def answer(post: int, given: JobInput) -> dict[str, Any]:
        output = read_all(given)
        if post == 1 or not once:
            output["pages"][0]["error"] = {"code": code, "message": "the page says no"}
        return output

    return answer


def failing_and_lost(asked: Asked) -> CallFault:
    """FAILED, then unknown, then FAILED: two different reasons, each with one repost."""
    if asked.job % 2:
        return call_faults.says_failed("CUDA out of memory")
    asked.pass_time(OLD)
    return refused(404)


def fails_after_the_cancel(asked: Asked) -> CallFault:
    asked.pass_time(NEAR_ITS_TTL)
    cancelled = asked.remote.runpod.job(asked.remote_id).status == "CANCELLED"
    return call_faults.says_failed("cancelled") if cancelled else says("IN_PROGRESS")


def cancelled_on_runpod(asked: Asked) -> CallFault:
    asked.remote.runpod.table.cancel(asked.remote_id)
    return NO_FAULT


def two_answers(_: int, given: JobInput) -> dict[str, Any]:
    """Return the first page twice, with two texts."""
    output = read_all(given)
    again = output["pages"][0] | {"markdown": "another text"}
    return output | {"pages": [*output["pages"], again]}


GZIP = CallFault(headers={"Content-Encoding": "gzip"})
CASES = [
    Case("nothing at all"),
    Case("run: 429 with Retry-After", (refused(429, "slow down", "1"),)),
    Case("run: 429 without", (refused(429), refused(429))),
    *[refused_post(status) for status in (400, 413, 422)],
    *[lost_post(f"{status}", refused(status), 1) for status in (500, 502, 503, 504)],
    lost_post("502 although accepted", failed_after(502), 2),
    lost_post("cut before it is accepted", call_faults.CUT_BEFORE, 1),
    lost_post("cut after it is accepted", call_faults.CUT_AFTER, 2),
    lost_post("half an answer", call_faults.HALF_AN_ANSWER, 2),
    lost_post("HTML, not accepted", call_faults.HTML, 1),
    lost_post("HTML, accepted", call_faults.HTML_AFTER, 2),
    lost_post("truncated JSON", call_faults.TRUNCATED_JSON, 2),
    lost_post("no id", call_faults.NO_ID, 2),
    lost_post("a list instead", CallFault(body=b"[]"), 2),
    lost_post("broken compression", GZIP, 2),
    lost_post("a redirect", CallFault(False, 302, headers={"Location": "/login"}), 1),
    lost_post("slower than the time-out", slow(REQUEST_TIMEOUT + 1), 2),
    Case("run: 502, the first half of a long document", (refused(502),), pages=16, accepted=3,
         rows=(("first", "repeated"), (LOST, "completed"), DONE, DONE)),
    Case("run: slow", (slow(REQUEST_TIMEOUT / 3),)),
    *[passing(f"{status} twice", *[refused(status)] * 2) for status in (500, 502, 503, 504, 400)],
    passing("429 with Retry-After", refused(429, "slow down", "1")),
    passing("cut", call_faults.CUT_BEFORE, call_faults.CUT_AFTER),
    passing("half an answer", call_faults.HALF_AN_ANSWER),
    passing("HTML", call_faults.HTML),
    passing("truncated JSON", call_faults.TRUNCATED_JSON),
    passing("broken compression", GZIP),
    passing("no status", CallFault(change=lambda body: {"id": body["id"]})),
    passing("times that are no numbers", says("IN_PROGRESS", executionTime=float("nan"))),
    passing("slower than the time-out", slow(REQUEST_TIMEOUT + 1)),
    passing("404 while fresh", refused(404), refused(404)),
    passing("a word we do not know", says("THROTTLED"), says("PAUSED")),
    passing("IN_QUEUE, RUNNING", says("IN_QUEUE"), says("RUNNING")),
    passing("backwards", says("IN_PROGRESS"), says("IN_QUEUE"), says("IN_PROGRESS")),
    posted_again("status: 404, old", "missing", EXPIRED, status=aged(OLD, refused(404))),
    given_up("status: 404, old, twice", "missing", EXPIRED, "remote_result_missing",
             status=all_lost(OLD)),
    posted_again("status: 404 past its ttl", "expired", EXPIRED,
                 status=aged(PAST_ITS_TTL, lost=True)),
    given_up("status: 404 past its ttl, twice", "expired", EXPIRED, "remote_job_expired",
             status=all_lost(PAST_ITS_TTL)),
    posted_again("status: no answer past its ttl", "expired", EXPIRED,
                 status=aged(LONG_GONE, refused(500))),
    posted_again("COMPLETED without output", "missing", SECOND,
                 status=first_job(call_faults.NO_OUTPUT)),
    given_up("COMPLETED without output, twice", "missing", SECOND, "remote_result_missing",
             status=always(call_faults.NO_OUTPUT)),
    given_up("COMPLETED with another's key", "missing", SECOND, "remote_result_missing",
             answer=another_key),
    posted_again("COMPLETED with another version", "missing", SECOND,
                 status=first_job(call_faults.with_output({"version": 2}))),
    posted_again("COMPLETED without a page", "completed", SECOND, answer=without_page_2, pages=3),
    Case("a page that cannot be rendered", answer=page_error("page_unrenderable"),
         error="page_unrenderable", says="the page says no"),
    posted_again("a page's error that passes", "completed", SECOND,
                 answer=page_error("ocr_unavailable", once=True)),
    given_up("a page's error that stays", "completed", SECOND, "ocr_failed",
             answer=page_error("ocr_unavailable"), says="the page says no"),
    Case("pages that did not fit the answer", answer=one_page_each, pages=3, accepted=3,
         rows=(DONE, ("remaining_pages", "completed"), ("remaining_pages", "completed"))),
    given_up("no page fits the answer", "completed", SECOND, "remote_result_missing",
             answer=nothing_but_remains),
    given_up("another's pages, all ours remain", "completed", SECOND, "remote_result_missing",
             answer=pages_of_another_job),
    posted_again("FAILED", "failed", SECOND, answer=fails_once),
    given_up("FAILED twice", "failed", SECOND, "remote_job_failed",
             answer=fails("CUDA out of memory"), says="CUDA out of memory"),
    given_up("FAILED, in plain words", "failed", SECOND, "remote_job_failed",
             status=always(says("FAILED", error="worker exited with exit code 137")),
             says="exit code 137"),
    Case("FAILED and unknown by turns", status=failing_and_lost, accepted=3,
         error="remote_job_failed",
         rows=(("first", "failed"), (SECOND, "missing"), (EXPIRED, "failed"))),
    posted_again("TIMED_OUT, one range of a long document", "timed_out", SECOND,
                 status=first_job(says("TIMED_OUT")), pages=16, more_rows=(DONE,)),
    given_up("COMPLETED with an error", "missing", SECOND, "remote_result_missing",
             status=always(call_faults.with_output({"error": "no space left on the volume"})),
             says="no space left on the volume"),
    given_up("two different answers for a page", "completed", SECOND, "remote_result_missing",
             answer=two_answers),
    Case("CANCELLED by somebody", status=cancelled_on_runpod, error="remote_job_cancelled",
         stuck=True, rows=(("first", "cancelled"),)),
    posted_again("TIMED_OUT", "timed_out", SECOND, status=first_job(says("TIMED_OUT"))),
    given_up("TIMED_OUT twice", "timed_out", SECOND, "remote_job_timed_out",
             status=always(says("TIMED_OUT"))),
    timed_out("IN_PROGRESS for ever", status=for_ever("IN_PROGRESS", executionTime=1000)),
    timed_out("IN_QUEUE for ever", status=for_ever("IN_QUEUE")),
    timed_out("IN_PROGRESS for ever, whatever we do", status=never_ends,
              cancel=cancel_does_nothing),
    timed_out("FAILED by our cancel", status=fails_after_the_cancel),
    timed_out("cancel: 500", status=for_ever("IN_PROGRESS"), cancel=first(refused(500))),
    timed_out("cancel: 429", status=for_ever("IN_PROGRESS"),
              cancel=first(refused(429, "slow down", "1"))),
    timed_out("cancel: cut", status=for_ever("IN_PROGRESS"), cancel=first(call_faults.CUT_BEFORE)),
    timed_out("cancel: HTML", status=for_ever("IN_PROGRESS"), cancel=first(call_faults.HTML_AFTER)),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


class Director:
    """Gives each call the answer that its document's case requires."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._cases: dict[str, Case] = {}
        self._jobs: dict[str, Case] = {}

    def cast(self, case: Case) -> None:
        case.document_id = self._remote.add(case.pages)
        self._cases[self._remote.run_id(case.document_id)] = case

    def direct(self, call: Call) -> CallFault | None:
        """Called in the server's thread."""
        if call.name == "run":
            case = self._of(call.key)
            case.posted += 1
            return case.posts[case.posted - 1] if case.posted <= len(case.posts) else None
        if call.name not in {"status", "cancel"} or call.job_id is None:
            return None
        case = self._case_of_job(call.job_id)
        case.asked[call.name, call.job_id] += 1
        number = case.jobs.index(call.job_id) + 1
        asked = Asked(self._remote, call.job_id, number, case.asked[call.name, call.job_id])
        if case.stuck:
            asked.keep_at_work()
        return (case.status if call.name == "status" else case.cancel)(asked)

    def answer(self, given: JobInput) -> dict[str, Any]:
        case = self._of(given["request_key"])
        case.answered += 1
        return case.answer(case.answered, given)

    def _of(self, key: str) -> Case:
        return self._cases[key.partition(":")[0]]

    def _case_of_job(self, job_id: str) -> Case:
        if job_id not in self._jobs:
            case = self._jobs[job_id] = self._of(self._remote.runpod.job(job_id).key)
            case.jobs.append(job_id)
        return self._jobs[job_id]


@pytest.fixture(scope="module")
def remote(stack: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    """One service that works on all cases."""
    # With two workers, half of a long document would be long enough to be split again.
    env = {"RAG_SERVICE_RUNPOD_WORKERS": "2"}
    with open_remote(stack, tmp_path_factory.mktemp("faults"), **env) as remote:
        director = Director(remote)
        for case in CASES:
            director.cast(case)
        remote.runpod.on_call = director.direct
        remote.runpod.play(director.answer, workers=4)
        remote.start(prepare=2, ocr=4)
        yield remote


@pytest.mark.parametrize("name", BY_NAME)
def test_every_fault_ends_in_its_record(remote: Remote, name: str) -> None:
    case = BY_NAME[name]
    view = remote.ended(case.document_id, 100)
    rows = remote.rows(case.document_id)
    failed = [page for page in remote.service.pages(case.document_id) if page.error is not None]
    assert Counter((post.reason, post.outcome) for post in rows) == Counter(case.rows)
    assert view.status == ("failed" if case.error else "processed")
    assert {page.error.code for page in failed if page.error} == ({case.error} - {None})
    assert all(case.says in page.error.message for page in failed if page.error)
    assert view.pages.ocr == case.pages - len(failed)
    assert sum(remote.accepted(case.document_id).values()) == case.accepted
    was_cancelled = any(what == "cancel" for what, _ in case.asked)
    assert was_cancelled == case.cancelled
    remote.require_reasons(case.document_id)


def test_a_repost_of_any_kind_keeps_the_pages_and_the_key_of_the_post_it_replaces(
    remote: Remote,
) -> None:
    """Under the key the handler finds the pages that it has read."""
    for case in CASES:
        ended = remote.ended(case.document_id, 100)
        if case.pages == 1 and ended.pages.total == 1:
            rows = remote.rows(case.document_id)
            assert {row.pages for row in rows} == {(1,)}, case.name
            assert len({row.request_key for row in rows}) == 1, case.name
        if (LOST, "completed") in case.rows:
            lost, again, *_ = remote.rows(case.document_id)
            assert (again.request_key, again.pages) == (lost.request_key, lost.pages), case.name
            assert remote.posts(case.document_id)[lost.request_key] == 2, case.name


def test_the_table_of_faults_is_kept(remote: Remote) -> None:
    """Write the table. It contains no times, so it changes only with the behaviour."""
    lines = [_line(remote, case) for case in CASES]
    table = Table(title=f"{len(lines)} faults of RunPod")
    for column in lines[0]:
        table.add_column(column.replace("_", " "))
    for line in lines:
        table.add_row(*map(str, line.values()))
    Console(width=180).print(table)
    RESULTS.write_text(json.dumps({"faults": lines}, indent=2) + "\n")
    assert len(lines) >= 25


def _line(remote: Remote, case: Case) -> dict[str, Any]:
    view = remote.ended(case.document_id, 100)
    pages = remote.service.pages(case.document_id)
    posts: list[Post] = remote.rows(case.document_id)
    return {
        "fault": case.name,
        "document": view.status,
        "page_errors": ", ".join(sorted({page.error.code for page in pages if page.error})),
        "posts": ", ".join(f"{post.reason}: {post.outcome}" for post in posts),
        "posts_per_request_key": ", ".join(
            str(number) for number in remote.posts(case.document_id).values()
        ),
        "jobs_made": sum(remote.accepted(case.document_id).values()),
    }
